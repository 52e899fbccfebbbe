"""Schemas that other people wrote, from `build/schemas`, where `make schemas` puts them; none of them is copied here.

The official JSON-Schema-Test-Suite, the tools of the Berkeley function-calling leaderboard, and schemas of
configuration files. Tests skip, and say so, where they have not been fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[2] / "build" / "schemas"
BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None, "long": "integer", "double": "number"}


class Group(NamedTuple):
    """One schema of the suite with instances and whether they are valid."""

    keyword: str
    schema: Any
    tests: list[tuple[Any, bool]]


def suite_groups() -> Iterator[Group]:
    draft = "jsonschema-*/json/tests/draft2020-12"
    for file in sorted([*FOLDER.glob(f"{draft}/*.json"), *FOLDER.glob(f"{draft}/optional/format/*.json")]):
        for group in json.loads(file.read_text()):
            yield Group(file.stem, group["schema"], [(test["data"], test["valid"]) for test in group["tests"]])


def tool_schemas() -> Iterator[dict[str, Any]]:
    """The parameters of the leaderboard's functions, with its own names of types put right."""
    for name in ("live_simple", "simple_python", "live_multiple", "multiple", "simple_java"):
        for file in FOLDER.glob(f"bfcl_eval/data/BFCL_v4_{name}.json"):
            for line in file.read_text().splitlines():
                for function in json.loads(line)["function"]:
                    yield _with_json_types(function["parameters"])


def configuration_schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas of configuration files, by name."""
    for file in sorted(FOLDER.glob("check_jsonschema/**/*.json")):
        document = json.loads(file.read_text())
        if isinstance(document, dict) and {"type", "properties", "$ref", "anyOf", "allOf", "oneOf"} & document.keys():
            yield file.name, document


def _with_json_types(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_json_types(part) for part in node]
    if not isinstance(node, dict):
        return node
    fixed = {key: _with_json_types(value) for key, value in node.items()}
    if isinstance(fixed.get("type"), str):
        name = BFCL_TYPES.get(fixed["type"].lower(), fixed["type"])
        fixed = {**fixed, "type": name} if name in JSON_TYPES else {k: v for k, v in fixed.items() if k != "type"}
    return fixed


JSON_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}

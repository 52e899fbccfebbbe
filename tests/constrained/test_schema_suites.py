"""Schemas of others: the official suite, tools of a leaderboard, configuration files. Valid or refused, never wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest

from bough.core.errors import RequestError
from tests.constrained.suites import configuration_schemas, suite_groups, tool_schemas
from tests.constrained.walks import accepts, matcher_of, random_text
from tests.fakes.grammar_specs import json_schema_spec

GROUPS = list(suite_groups())
fetched = pytest.mark.skipif(not GROUPS, reason="the schemas are not there: `make schemas` fetches them")


def judge(schema: Any, text: bytes) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@fetched
@pytest.mark.parametrize(
    ("backend", "step"),
    [
        ("llguidance", 1),
        ("xgrammar", 6),
        pytest.param("xgrammar", 1, marks=pytest.mark.slow),
    ],
)
def test_the_official_suite(backend: str, step: int) -> None:
    """No instance is accepted that is invalid, and most that are valid can be written."""
    counts: Counter[str] = Counter()
    for group in GROUPS[::step]:
        try:
            matcher = matcher_of(json_schema_spec(group.schema), backend)
        except RequestError as error:
            assert str(error)
            counts["refused"] += 1
            continue
        for instance, valid in group.tests:
            accepted = accepts(matcher, json.dumps(instance, ensure_ascii=False))
            assert valid or not accepted, (group, instance)
            counts[f"valid {'written' if accepted else 'not written'}" if valid else "invalid"] += 1
        text = random_text(matcher, random.Random(len(group.tests)), most=80)
        if text is not None and _has_a_reference_validator(group.schema):
            judge(group.schema, text)
    assert counts["valid written"] > 2 * counts["valid not written"], counts
    assert counts["refused"] < 0.6 * len(GROUPS[::step]), counts


def _has_a_reference_validator(schema: Any) -> bool:
    return "localhost" not in json.dumps(schema)


@fetched
@pytest.mark.parametrize(("backend", "step"), [("xgrammar", 12), ("llguidance", 12), ("outlines-core", 60)])
def test_tools_of_a_leaderboard(backend: str, step: int) -> None:
    """At least 150 schemas of real functions: a random sampler's arguments validate."""
    schemas = list({json.dumps(schema): schema for schema in tool_schemas()}.values())
    assert len(schemas) > 1000
    counts: Counter[str] = Counter()
    for number, schema in enumerate(schemas[::step]):
        try:
            matcher = matcher_of(json_schema_spec(schema), backend)
        except RequestError:
            counts["refused"] += 1
            continue
        text = random_text(matcher, random.Random(number))
        if text is not None:
            judge(schema, text)
            counts["valid"] += 1
    assert counts["valid"] > 0.75 * len(schemas[::step]), counts
    assert counts["refused"] < 0.2 * len(schemas[::step]), counts


@fetched
@pytest.mark.slow
def test_configuration_files() -> None:
    """Large schemas with everything in them, enforced as far as that goes, or refused with a reason."""
    for name, schema in configuration_schemas():
        try:
            matcher = matcher_of(json_schema_spec(schema, strict=False), "llguidance")
            text = random_text(matcher, random.Random(1), most=200)
        except RequestError as error:  # before it begins, or where the library's limits end it
            assert len(str(error)) > 20, name
            continue
        if text is not None:
            json.loads(text)

"""docs/server.md is complete and true where that can be checked: settings, routes, and the example of the README."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from bough.core.setting_checks import help_of
from bough.core.settings import all_fields
from bough.server.native.control import SUMMARIES
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "server.md").read_text()
DOCUMENTED_GROUPS = ("server", "scheduler", "process")
FIELDS = {f.name: (group, f) for group, f in all_fields()}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def shown_default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == "":
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def row_of(f: dataclasses.Field[Any]) -> str:
    return f"| `{flag_of(f.name)}` | {shown_default(f.default)} | {help_of(f)} |"


def test_every_setting_is_in_the_guide_with_its_default_and_help() -> None:
    rows = [row_of(f) for group, f in FIELDS.values() if group in DOCUMENTED_GROUPS]
    missing = [row for row in rows if row not in GUIDE.splitlines()]
    assert not missing, "docs/server.md lacks these lines"


def test_the_guide_names_no_flag_that_does_not_exist() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GUIDE))
    assert named - {flag_of(name) for name in FIELDS} <= {"--config", "--help"}


def test_every_route_is_in_the_guide() -> None:
    paths = {re.sub(r":\w+}", "}", endpoint.path) for endpoint in all_endpoints(NativeEngine(lambda _: None).context())}
    missing = [path for path in sorted(paths) if not re.search(re.escape(path) + r"[`/\s{]", GUIDE)]
    assert set(missing) <= {"/v1/tokenize", "/v1/detokenize"}, missing  # "also under /v1"


def test_every_summary_of_the_table_is_of_a_route() -> None:
    paths = {endpoint.path for endpoint in all_endpoints(NativeEngine(lambda _: None).context())}
    assert not SUMMARIES.keys() - paths


def test_the_readme_points_to_the_guide() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "(docs/server.md)" in readme and "openai.OpenAI(base_url=" in readme

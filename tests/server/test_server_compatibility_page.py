"""docs/compatibility.md says of each route and flag what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bough.core.settings import all_fields
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| (same|better|different|missing) \|", PAGE, re.MULTILINE)


def test_every_row_has_a_verdict() -> None:
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE, re.MULTILINE)) > 80


@pytest.mark.parametrize(("name", "verdict"), ROWS)
def test_what_the_page_says_of(name: str, verdict: str) -> None:
    if name.startswith("--"):
        built = {f.name for group, f in all_fields() if group != "unbuilt"}
        found = name.removeprefix("--").replace("-", "_") in built
    else:
        context = NativeEngine(lambda message: []).context()
        found = name in {endpoint.path for endpoint in all_endpoints(context)}
    assert found == (verdict != "missing")

"""docs/compatibility.md says of each route and flag what the code does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bough.core.settings import ALIASES, MODEL_TOKENS, NGRAM_TOKENS, TREE_TOKENS, all_fields
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| (same|better|different|missing) \|", PAGE, re.MULTILINE)


SGLANG = (
    Path(sys.prefix) / "clients/lib" / f"python3.{sys.version_info.minor}" / "site-packages/sglang/srt/server_args.py"
)


@pytest.mark.skipif(not SGLANG.exists(), reason="`make clients` installs SGLang's client side")
def test_every_flag_of_sglang_is_on_the_page() -> None:
    theirs = set(re.findall(r'(?:add_argument\(\s*|^\s+)"(--[a-z0-9-]+)"', SGLANG.read_text(), re.MULTILINE))
    assert len(theirs) > 300 and not theirs - set(re.findall(r"`(--[a-z0-9-]+)", PAGE))


def test_what_is_said_not_to_be_here_is_refused() -> None:
    _, _, listed = PAGE.partition("### Flags that are not here")
    named = re.findall(r"`--([a-z0-9-]+)`", listed.partition("\n## ")[0])
    built = {f.name for group, f in all_fields() if group != "unbuilt"} | ALIASES.keys()
    assert len(named) > 200 and not built.intersection(name.replace("-", "_") for name in named)


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


def test_the_defaults_that_the_page_names_are_those_of_the_settings() -> None:
    named = re.findall(r"^\| `--([a-z0-9-]+)` \| \w+ \| ([\d.,]+)[^;|]* by default", PAGE, re.MULTILINE)
    defaults = {f.name.replace("_", "-"): f.default for _, f in all_fields()}
    told = {name: float(number.replace(",", "")) for name, number in named if isinstance(defaults[name], int | float)}
    assert len(told) >= 4 and told == {name: float(defaults[name]) for name in told}
    tokens = f"{NGRAM_TOKENS} by default, {MODEL_TOKENS} with a draft model, {TREE_TOKENS} with trees"
    assert f"| `--speculative-num-draft-tokens` | different | {tokens} |" in PAGE

"""docs/compatibility.md says of each route and flag what the code does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bough.cli.gateway import _parser
from bough.cli.main import main
from bough.core.settings import ALIASES, MODEL_TOKENS, NGRAM_TOKENS, TREE_TOKENS, all_fields
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine

ROW = re.compile(r"^\| `([^`]+)` \| (same|better|different|missing) \|", re.MULTILINE)
WHOLE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
PAGE, _, ROUTER = WHOLE.partition("\n## The router's flags\n")
ROWS = ROW.findall(PAGE)
SGLANG = (
    Path(sys.prefix) / "clients/lib" / f"python3.{sys.version_info.minor}" / "site-packages/sglang/srt/server_args.py"
)


ROUTER_VALUES = {
    **dict.fromkeys(("--pd-disaggregation", "--enable-igw", "--disable-retries", "--disable-circuit-breaker"), ()),
    "--service-discovery": (),
    "--backend": ("sglang",),
    "--history-backend": ("memory",),
}


@pytest.mark.skipif(not SGLANG.exists(), reason="`make clients` installs SGLang's client side")
def test_every_flag_of_sglang_is_on_the_page() -> None:
    theirs = set(re.findall(r'(?:add_argument\(\s*|^\s+)"(--[a-z0-9-]+)"', SGLANG.read_text(), re.MULTILINE))
    assert len(theirs) > 300 and not theirs - set(re.findall(r"`(--[a-z0-9-]+)", PAGE))


def test_what_is_said_not_to_be_here_is_refused() -> None:
    _, _, listed = PAGE.partition("### Flags that are not here")
    named = re.findall(r"`--([a-z0-9-]+)`", listed.partition("\n## ")[0])
    built = {f.name for group, f in all_fields() if group != "unbuilt"} | ALIASES.keys()
    assert len(named) > 200 and not built.intersection(name.replace("-", "_") for name in named)


def test_the_routers_flags_are_accepted_or_refused_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    table, _, listed = ROUTER.partition("\nThese are refused")
    accepted = [flag for flag, _ in ROW.findall(table)]
    refused = re.findall(r"`(--[a-z0-9-]+)`", re.sub(r"\(.*?\)", "", listed, flags=re.DOTALL))
    assert len(accepted) == 51 and len(refused) == len(set(refused)) == 56
    for flag in accepted:
        _parser().parse([flag, *ROUTER_VALUES.get(flag, ["1"])])  # which exits where it does not know the flag
    for flag in refused:
        assert main(["gateway", flag, "x"]) == 2
        assert f"{flag} is not here: " in capsys.readouterr().err


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

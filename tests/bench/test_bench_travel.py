"""The benchmarks of tiers, files and pairs on a tiny model: what they count adds up, and a picture is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bough.cli.main import main

pytestmark = pytest.mark.slow

TINY = ["--load-format", "dummy", "--cpu-threads", "1", "--device", "cpu", "--vocab", "100", "--json"]


def lines_of(name: str, capsys: pytest.CaptureFixture[str], picture: Path, *flags: str) -> list[dict[str, Any]]:
    assert main(["bench", name, *TINY, "--plot", str(picture), *flags]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_chats_find_their_contexts_on_the_host(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--chats", "4", "--turns", "2", "--context-len", "40", "60", "--concurrency", "1", "--repeat", "1"]
    off, on = lines_of("tiers", capsys, tmp_path / "p.png", "--model", str(tiny_model), *load)
    assert (off["tier"], on["tier"]) == ("off", "on")
    assert (
        on["load_back_tokens_total"] > 0
        and on["later_tok_s"] > 0
        and on["copy_in_gb_s"] > 0
        and on["cached_share"] > off["cached_share"]
    )


def test_an_engine_that_starts_again_has_its_conversations_from_disk(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--conversations", "2", "--context-len", "300", "--folder", str(tmp_path)]
    (line,) = lines_of("restart", capsys, tmp_path / "p.png", "--model", str(tiny_model), *load)
    assert line["tokens_from_disk"] == 2 * 256 and line["same_answers"] == 2
    assert line["stored_bytes"] > 0 and all(line[f"{kind}_ttft_p50_s"] > 0 for kind in ("cold", "from_disk"))


def test_a_pair_answers_as_one_engine_does(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--requests", "6", "--long-len", "200", "--short-len", "10", "20", "--long-every", "3", "--output-len", "4"]
    load += ["--rate", "50", "--repeat", "1", "--max-total-tokens", "2048"]
    one, pair, both = lines_of("pd", capsys, tmp_path / "p.png", "--model", str(tiny_model), *load)
    assert (one["side"], pair["side"]) == ("one", "pair") and both["same_answers"] == both["requests"] == 6
    assert both["transferred_bytes"] > 0 and both["pair_by_one"]["gap_p99_s"] == pair["gap_p99_s"] / one["gap_p99_s"]

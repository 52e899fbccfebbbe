"""`bough bench edge`: the stand-in behind a real scheduler, and the whole benchmark once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bough.cli.main import main
from tests.bench import null_executor
from tests.bench.edge_client import _is_complete
from tests.bench.null_executor import NullExecutor
from tests.fakes.boxes import generate
from tests.fakes.scheduler_bench import Bench
from tests.fakes.scripted_engine import byte_level_tokenizer


def test_the_stand_in_serves_whatever_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(null_executor, "TOKENS", 256)
    bench = Bench(NullExecutor(context_length=64, vocab_size=5000))  # type: ignore[arg-type]
    for handle in (1, 2, 3):
        bench.submit(generate(handle, [5] * handle, max_new_tokens=handle + 1))
    bench.run()
    outputs = {handle: bench.out.outputs[handle] for handle in (1, 2, 3)}
    assert {handle: len(tokens) for handle, tokens in outputs.items()} == {1: 2, 2: 3, 3: 4}
    assert all(1000 <= token < 5000 for tokens in outputs.values() for token in tokens)


def test_an_answer_is_complete_at_its_declared_length() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n"
    assert not _is_complete(head) and not _is_complete(head + b"\r\nabc") and _is_complete(head + b"\r\nabcd")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_both_loads_are_measured(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(model), "--seconds", "0.2", "--connections", "4", "--stream-len", "8", "--json"]
    assert main(["bench", "edge", *flags]) == 0
    whole, streamed = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert whole["requests"] >= 4 and whole["tokens_per_event"] is None
    assert streamed["requests"] >= 4 and 1 <= streamed["tokens_per_event"] <= 8
    assert set(whole["cpu_us_per_request"]) == {"http", "scheduler", "detokenizer", "clients"}


@pytest.mark.parametrize("flag", ["--connections", "--procs", "--stream-len"])
def test_a_load_of_nothing_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "edge", flag, "0"]) == 2
    assert capsys.readouterr().err == f"bough: {flag} must be at least 1, got 0.\n"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_load_takes_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "edge", "--seconds", seconds]) == 2
    assert capsys.readouterr().err == f"bough: --seconds must be above 0, got {seconds}.\n"

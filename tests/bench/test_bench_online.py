"""`bough bench online`: its draws are those of the published figures, and its line adds up."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json

import pytest

from bough.cli.main import main
from bough.core.finish import FinishAbort
from tests.bench import online
from tests.bench.bench_server import bench_server, letters
from tests.bench.online import Timed, summary, tokens_of, w5_arrivals, w6_draw, w6_system_prompt


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def test_the_draws_are_those_of_the_published_figures() -> None:
    arrivals = w5_arrivals(seed=2, rate=64.0, part=1, parts=6)
    assert len(arrivals) == 1024 // 6
    assert digest([[round(a.at_s, 9), a.prompt] for a in arrivals]) == "7b2a3863c732159a"
    draw = w6_draw(seed=4, user=3)
    turns = [tokens_of(draw, 64), tokens_of(draw, 128)]
    assert digest([w6_system_prompt(seed=4), turns]) == "c5bbbae3fa7fdd75"


def timed(first_s: float, gaps_s: list[float]) -> Timed:
    return Timed(0.0, first_s, first_s + sum(gaps_s), gaps_s, [])


def test_the_line_adds_up() -> None:
    args = argparse.Namespace(work="W5", rate=8.0)
    rows = [timed(0.1, [0.01, 0.03]), timed(0.3, [0.02]), "503: busy"]
    assert summary(args, rows, 4.0) == {
        "work": "W5",
        "rate": 8.0,
        "requests": 3,
        "failed": 1,
        "first_failure": "503: busy",
        "seconds": 4.0,
        "out_tok_s": 64.0,
        "ttft_ms": [300.0, 300.0],
        "itl_ms": [20.0, 30.0],
        "e2e_ms": [320.0, 320.0],
    }
    assert summary(args, [], 1.0)["ttft_ms"] == [None, None]


@pytest.mark.parametrize("work", ["W5", "W6"])
def test_a_server_is_driven(work: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, small in {"REQUESTS": 8, "USERS": 3, "TURNS": 2, "OUTPUT_TOKENS": 4, "LARGEST_TOKEN": 90}.items():
        monkeypatch.setattr(online, name, small)
    with bench_server() as server:
        assert main(["bench", "online", "--url", server.url, "--model", "tiny", "--work", work, "--procs", "1"]) == 0
        requests = server.engine.requests
    line = json.loads(capsys.readouterr().out)
    assert line["failed"] == 0 and line["requests"] == len(requests) == (8 if work == "W5" else 6)
    if work == "W6":  # each user's second turn begins with its first and the answer
        prompts = sorted(len(r.input_ids) // 4 for r in requests)
        assert prompts == [576] * 3 + [576 + 4 + 64] * 3


def test_a_server_that_is_not_there_is_one_sentence_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "run_parts", lambda *work: pytest.fail("requests were sent"))
    assert main(["bench", "online", "--url", "http://127.0.0.1:9", "--model", "x"]) == 1
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.startswith("bough: Cannot reach http://127.0.0.1:9: ")
    assert len(seen.err.splitlines()) == 1


@pytest.mark.parametrize("spared", [0, 1])
def test_failures_are_figures_until_nothing_else_is_left(
    spared: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, small in {"REQUESTS": 3, "OUTPUT_TOKENS": 4, "LARGEST_TOKEN": 90}.items():
        monkeypatch.setattr(online, name, small)
    answers = itertools.chain(
        [letters] * spared, itertools.repeat(lambda request: FinishAbort("too much", 429, "Busy"))
    )
    with bench_server(lambda request: next(answers)(request)) as server:
        code = main(["bench", "online", "--url", server.url, "--model", "tiny", "--procs", "1", "--rate", "99"])
    seen = capsys.readouterr()
    line = json.loads(seen.out)
    assert line["failed"] == 3 - spared and "too much" in line["first_failure"]
    assert code == (0 if spared else 1)
    assert ("Every request failed, the first with: 429" in seen.err) == (not spared)


@pytest.mark.parametrize(
    ("flag", "complaint"), [("--procs", "must be at least 1, got 0."), ("--rate", "must be above 0, got 0.")]
)
def test_a_load_of_nothing_is_refused(flag: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "online", "--url", "http://127.0.0.1:9", "--model", "x", flag, "0"]) == 2
    assert capsys.readouterr().err == f"bough: {flag} {complaint}\n"

"""A server whose engine is killed writes its last requests down; `bough replay` sends them to the next server."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.cli.replay import read_dump
from tests.system.serving import PATIENCE_S, Server, load_of, running, until

pytestmark = pytest.mark.slow

GREEDY = {"max_new_tokens": 8, "temperature": 0}
LONG = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "stream": True}
FINISHED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "The capital of France is", "sampling_params": GREEDY}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "One\u2028two\r\nthree."}], "max_tokens": 8}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8, "stream": True}),
]


def die_with_a_running_stream(server: Server) -> list[str]:
    """The lines of the stream."""
    with httpx.stream("POST", f"{server.url}/generate", json=LONG, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.child("scheduler").kill()
        return [first, *lines]


def replay(dump: Path, url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "bough.cli.main", "replay", str(dump), "--url", url, "--speed", "0", *flags]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def kill_when_busy(server: Server) -> None:
    until(lambda: load_of(server.url)["num_running_reqs"], "a running request")
    server.child("scheduler").kill()


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.long)])
def test_what_a_dead_engine_left_is_answered_by_the_next(tmp_path: Path, workers: int) -> None:
    flags = ("--max-total-tokens", "20000", "--tokenizer-worker-num", str(workers))
    with running(*flags, "--crash-dump-folder", str(tmp_path / "dumps")) as server:
        for path, body in FINISHED:
            assert httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S).status_code == 200
        assert "error" in "".join(die_with_a_running_stream(server)[1:])
        assert server.wait() == 1 and "`bough replay` sends them again" in server.log()
    dumps = sorted((tmp_path / "dumps").iterdir())  # of each worker that had requests
    requests = [request for dump in dumps for request in read_dump(dump)]
    assert {(r["path"], str(r["body"]), r["finished"]) for r in requests} == {
        *((path, str(body), True) for path, body in FINISHED),
        ("/generate", str(LONG), False),
    }
    everything = tmp_path / "everything.jsonl"
    everything.write_bytes(b"".join(dump.read_bytes() for dump in dumps))
    with running(*flags, "--log-requests", "--log-requests-level", "0") as server:
        done = replay(everything, server.url)
        assert done.returncode == 0 and "4 of 4 requests answered." in done.stdout, done.stdout + done.stderr
        for path, _ in FINISHED:
            until(lambda path=path: f"POST {path} 200 in " in server.log(), f"a line of {path}")
        done = replay(everything, server.url, "--unfinished")
        assert done.returncode == 0 and "1 of 1 requests answered." in done.stdout, done.stdout + done.stderr
        until(lambda: server.log().count("POST /generate 200 in ") == 3, "a line of each answer")
        threading.Thread(target=kill_when_busy, args=(server,), daemon=True).start()
        done = replay(everything, server.url, "--unfinished")
        assert done.returncode == 1 and "1 /generate: 200, with an error" in done.stdout, done.stdout + done.stderr
    done = replay(everything, server.url)
    assert done.returncode == 1 and "0 of 4 requests answered." in done.stdout and not done.stderr

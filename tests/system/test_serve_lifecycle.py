"""The server's life: start, stop, drain, death and stillness, with real processes and a tiny model."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.system.serving import PATIENCE_S, TINY, Server, load_of, running, until

LONG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}


def events_of(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


class Reader(threading.Thread):
    """Reads a stream in the background; `begun` is set at its first event."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, body
        self.begun = threading.Event()
        self.events: list[Any] = []
        self.start()
        assert self.begun.wait(PATIENCE_S)

    def run(self) -> None:
        url = f"{self.url}/generate"
        cut_off = contextlib.suppress(httpx.RemoteProtocolError)  # shows as a stream without its end
        with cut_off, httpx.stream("POST", url, json=self.body, timeout=PATIENCE_S) as response:
            for event in events_of(response):
                self.events.append(event)
                self.begun.set()

    def all(self) -> list[Any]:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.events


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running("--port", str(port), ready=False) as server:
            assert server.wait() == 2
            assert server.log() == (
                f"bough: Port {port} on 127.0.0.1 is in use; choose another with --port, or end what listens there.\n"
            )


def test_the_port_answers_while_the_model_loads_and_a_signal_ends_that(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with running(str(tiny_model), *TINY, "--port", str(port), ready=False) as server:
        reply = until(lambda: _get(f"http://127.0.0.1:{port}/health"), "an open port")
        assert reply.status_code in (200, 503)
        if reply.status_code == 503:
            assert "loading" in reply.json()["error"]["message"] and reply.headers["retry-after"]
        server.tell(signal.SIGTERM)
        assert server.wait() == 0


def _get(url: str) -> httpx.Response | None:
    try:
        return httpx.get(url)
    except httpx.TransportError:
        return None


def test_a_bad_model_ends_the_server_with_its_sentence(tmp_path: Path) -> None:
    with running(str(tmp_path / "nothing-here"), ready=False) as server:
        assert server.wait() == 1
        assert server.log().count("\n") == 1 and "nothing-here" in server.log()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_stop_lets_what_runs_finish(tiny_model: Path, workers: int) -> None:
    with running(str(tiny_model), *TINY, "--tokenizer-worker-num", str(workers)) as server:
        readers = [Reader(server.url, LONG) for _ in range(4)]
        processes = server.children()
        server.tell(signal.SIGTERM)
        turned_away = until(lambda: _turned_away(server), "a server that takes no more")
        for reader in readers:
            events = reader.all()
            assert events[-1] == "[DONE]" and len(events[-2]["output_ids"]) == 400
        assert server.wait() == 0 and turned_away
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert not alive


def _turned_away(server: Server) -> bool:
    reply = _get(f"{server.url}/health")
    return reply is None or reply.status_code == 503


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_aborted(tiny_model: Path) -> None:
    with running(str(tiny_model), *TINY, "--drain-timeout-s", "0.1", "--context-length", "4000") as server:
        body = LONG | {"sampling_params": {"max_new_tokens": 3500, "ignore_eos": True}}
        reader = Reader(server.url, body)
        server.tell(signal.SIGINT)
        events = reader.all()
        assert events[-1] == "[DONE]" and events[-2]["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.wait() == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tiny_model: Path) -> None:
    with running(str(tiny_model), *TINY, "--context-length", "4000") as server:
        Reader(server.url, LONG | {"sampling_params": {"max_new_tokens": 3500, "ignore_eos": True}})
        processes = server.children()
        server.tell(signal.SIGTERM)
        until(lambda: _turned_away(server), "a server that drains")
        server.tell(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert not alive


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_dead_scheduler_ends_every_stream_with_an_error(tiny_model: Path, workers: int) -> None:
    flags = ("--context-length", "4000", "--max-total-tokens", "16000", "--tokenizer-worker-num", str(workers))
    with running(str(tiny_model), *TINY, *flags) as server:
        body = LONG | {"sampling_params": {"max_new_tokens": 3900, "ignore_eos": True}}
        processes, scheduler = server.children(), server.child("scheduler")
        readers = [Reader(server.url, body) for _ in range(4)]
        scheduler.kill()
        for reader in readers:
            events = reader.all()
            assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == 503
            assert "The scheduler process" in events[-2]["error"]["message"]  # from either HTTP process
        assert server.wait() == 1
        assert "The scheduler process" in server.log() and "SIGKILL" in server.log()
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
        assert not alive


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_pages(tiny_model: Path) -> None:
    with running(str(tiny_model), *TINY, "--context-length", "4000", "--disable-radix-cache") as server:
        body = LONG | {"sampling_params": {"max_new_tokens": 3500, "ignore_eos": True}}
        with httpx.stream("POST", f"{server.url}/generate", json=body) as response:
            events = events_of(response)  # httpx lets go of a stream with the last reference to its iterator
            assert next(events)["output_ids"]
            until(lambda: load_of(server.url)["num_running_reqs"] == 1, "a running request")
        until(lambda: load_of(server.url)["num_used_tokens"] == 0, "free pages")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/generate", json=body | {"stream": False}, timeout=0.5)
        for what in ("num_used_tokens", "num_running_reqs"):
            until(lambda what=what: load_of(server.url)[what] == 0, f"no more {what}")


@pytest.mark.slow
def test_a_stuck_scheduler_shows_in_health_and_in_the_log(tiny_model: Path) -> None:
    with running(str(tiny_model), *TINY, "--watchdog-timeout", "1") as server:
        scheduler = server.child("scheduler")
        scheduler.suspend()
        began = time.monotonic()
        reply = until(lambda: (r := httpx.get(f"{server.url}/health")).status_code == 503 and r, "a 503")
        assert "has not moved" in reply.json()["error"]["message"] and time.monotonic() - began < PATIENCE_S
        scheduler.resume()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "a healthy server")
        stacks = until(lambda: "bough/scheduler/loop.py" in server.log() and server.log(), "stacks in the log")
        for name, file in (
            ("server", "bough/server/watchdog.py"),
            (f"scheduler (pid {scheduler.pid})", "bough/scheduler/loop.py"),
            ("detokenizer", "bough/launch/detokenizer_process.py"),
        ):
            assert any(line.startswith(name) and file in line for line in stacks.splitlines()), name


def stands_still(reader: Reader) -> bool:
    """In its middle: what was on its way when the engine paused has come."""
    seen = len(reader.events)
    time.sleep(0.2)
    return len(reader.events) == seen and reader.events[-1] != "[DONE]"


@pytest.mark.slow
def test_pause_continue_flush_and_profile(tiny_model: Path, tmp_path: Path) -> None:
    with running(str(tiny_model), *TINY) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for mode in ("in_place", "retract"):
            reader = Reader(server.url, LONG)
            assert client.post("/pause_generation", json={"mode": mode}).json()["success"]
            until(lambda reader=reader: stands_still(reader), "a stream that stands still")
            assert (client.post("/flush_cache").status_code == 200) == (mode == "retract")
            assert client.post("/continue_generation").status_code == 200
            assert len(reader.all()[-2]["output_ids"]) == 400
        reader = Reader(server.url, LONG)
        assert client.get("/flush_cache").status_code == 400
        assert client.post("/pause_generation").status_code == 200
        assert reader.all()[-2]["meta_info"]["finish_reason"]["type"] == "abort"
        assert client.post("/continue_generation").status_code == 200
        assert client.get("/flush_cache", params={"timeout": 5}).status_code == 200
        assert client.post("/start_profile", json={"output_dir": str(tmp_path)}).status_code == 200
        assert client.post("/start_profile").status_code == 400
        client.post("/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}})
        assert str(tmp_path) in client.post("/stop_profile").json()["message"]
        assert [path.stat().st_size > 100 for path in tmp_path.glob("*.trace.json.gz")] == [True]
        assert client.get("/stop_profile").status_code == 400

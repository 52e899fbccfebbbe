"""What the gateway's benchmark measures: stand-in workers, a real gateway before them, and users over HTTP.

Whatever it starts it also ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import uvloop

from bough.bench.http_client import HttpClient, HttpFailure
from bough.core.child_environment import child_environment
from bough.core.errors import EngineDeadError
from bough.gateway.upstream_response import EventReader
from tests.bench.gateway_simulation import Costs, Dialogue, Served, Turn, answer_text
from tests.bench.gateway_worker import MODEL, WorkerSpec

TIMEOUT_S = 60.0  # for a process to start, and to end


@contextlib.contextmanager
def worker_processes(count: int, costs: Costs, event_tokens: int) -> Iterator[list[str]]:
    """The URLs of stand-ins that publish their cache events."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        urls: list[str] = []
        for number in range(count):
            base = f"ipc://{folder}/{number}"
            events = {"endpoint": f"{base}.events", "replay_endpoint": f"{base}.replays"}
            spec = WorkerSpec(f"worker-{number}", costs, json.dumps(events), event_tokens)
            process = stack.enter_context(_running(["-m", "tests.bench.gateway_worker"]))
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            process.stdin.flush()
            urls.append(_url_of(process))
        yield urls


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway under measurement."""

    url: str
    process_id: int


@contextlib.contextmanager
def gateway_process(workers: Sequence[str], policy: str, processes: int = 1) -> Iterator[RunningGateway]:
    """A gateway with all of the workers in rotation."""
    flags = {"port": 0, "policy": policy, "processes": processes, "log-level": "warning"}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    with _running(["-m", "bough.cli.main", "gateway", *words, "--worker-urls", *workers]) as process:
        url = _url_of(process)
        _wait_for_workers(url, len(workers))
        yield RunningGateway(url, process.pid)


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-P", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
        start_new_session=True,  # an interrupt is for the benchmark, which ends its children itself
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _url_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    welcome = process.stdout.readline().decode()
    found = re.search(r"served at (\S+)", welcome)
    if found is None:
        raise EngineDeadError(f"A process of the benchmark did not start: {welcome or 'its log above says why'}")
    return found[1]


def _wait_for_workers(url: str, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with urllib.request.urlopen(f"{url}/workers") as answer:
            workers = json.load(answer)["workers"]
        if sum(bool(worker["is_healthy"]) for worker in workers) == count:
            return
        if time.monotonic() > deadline:
            raise EngineDeadError(f"Not all workers came into rotation: {workers}")
        time.sleep(0.05)


# ---- users


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details


class _LastEvent(msgspec.Struct):
    system_fingerprint: str
    usage: _Usage


def drive(url: str, dialogues: Sequence[Dialogue], users: int) -> list[Served]:
    """Each of the users waits for an answer before the next turn is sent."""

    async def run() -> list[Served]:
        client = HttpClient(url)
        waiting, served = iter(dialogues), list[Served]()
        try:
            await asyncio.gather(*(_use(client, waiting, served) for _ in range(users)))
        finally:
            client.close()
        return served

    return uvloop.run(run())


async def _use(client: HttpClient, waiting: Iterator[Dialogue], served: list[Served]) -> None:
    for dialogue in waiting:
        history = ""
        for turn in dialogue:
            prompt = history + turn.text
            served.append(await _ask(client, prompt, turn))
            history = prompt + answer_text(zlib.crc32(prompt.encode()), turn.output_tokens)


async def _ask(client: HttpClient, prompt: str, turn: Turn) -> Served:
    reader, last, first_s = EventReader(), b"", 0.0
    sent_s = time.perf_counter()

    def on_data(data: bytes) -> None:
        nonlocal last, first_s
        events = reader.feed(data)
        if events:
            first_s = first_s or time.perf_counter() - sent_s
            last = events[-1]

    body = {"model": MODEL, "prompt": prompt, "max_tokens": turn.output_tokens, "stream": True}
    try:
        answer = await client.post("/v1/completions", body, on_data)
        if answer.status != 200:
            raise EngineDeadError(f"The gateway answered {answer.status}: {answer.text[:300]}")
        end = msgspec.json.decode(last, type=_LastEvent)
    except (HttpFailure, msgspec.MsgspecError) as error:
        raise EngineDeadError(f"A request of the benchmark failed: {error}") from None
    return Served(
        worker=end.system_fingerprint,
        prompt_tokens=end.usage.prompt_tokens,
        cached_tokens=end.usage.prompt_tokens_details.cached_tokens,
        expected_cached=None,
        output_tokens=end.usage.completion_tokens,
        sent_s=sent_s,
        first_s=first_s,
        total_s=time.perf_counter() - sent_s,
    )

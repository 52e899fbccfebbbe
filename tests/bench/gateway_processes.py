"""What the gateway's benchmark measures: stand-in workers or engines, a real gateway before them, users over HTTP.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from bough.bench.backends import HttpClient, HttpFailure
from bough.core.child_environment import child_environment
from bough.core.errors import EngineDeadError
from bough.gateway.upstream_response import EventReader
from tests.bench.gateway_simulation import Costs, Dialogue, Served, Turn
from tests.bench.gateway_worker import WorkerSpec

TIMEOUT_S = 60.0  # for a process to start, and to end
ENGINES_TIMEOUT_S = 600.0  # for engines to load their models


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
def gateway_process(
    workers: Sequence[str], policy: str, processes: int = 1, tree: Path | None = None
) -> Iterator[RunningGateway]:
    """A gateway with all of the workers in rotation; `tree` is another checkout that it comes from."""
    words = _words({"policy": policy, "processes": processes})
    with _gateway([*words, "--worker-urls", *workers], len(workers), TIMEOUT_S, tree) as gateway:
        yield gateway


@contextlib.contextmanager
def program_process(words: Sequence[str]) -> Iterator[RunningGateway]:
    """A program of the benchmark that says its address."""
    with _running(["-m", *words]) as process:
        yield RunningGateway(_url_of(process), process.pid)


@contextlib.contextmanager
def gateway_of_engines(
    count: int, model: str, cache_tokens: int, policy: str, processes: int = 1
) -> Iterator[RunningGateway]:
    """A gateway with engines of its own, whose caches are empty."""
    words = _words({"policy": policy, "processes": processes, "launch": count})
    engines = _words({"model": model, "max-total-tokens": cache_tokens, "log-level": "warning"})
    with _gateway([*words, "--", *engines], count, ENGINES_TIMEOUT_S) as gateway:
        yield gateway


def _words(flags: dict[str, object]) -> list[str]:
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


@contextlib.contextmanager
def _gateway(
    flags: Sequence[str], workers: int, timeout_s: float, tree: Path | None = None
) -> Iterator[RunningGateway]:
    words = _words({"port": 0, "log-level": "warning"})
    with _running(["-m", "bough.cli.main", "gateway", *words, *flags], tree) as process:
        url = _url_of(process)
        _wait_for_workers(url, workers, timeout_s)
        yield RunningGateway(url, process.pid)


@contextlib.contextmanager
def _running(command: Sequence[str], tree: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    elsewhere = {} if tree is None else {"PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        [sys.executable, "-P", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**child_environment(), **elsewhere},
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


def _wait_for_workers(url: str, count: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
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


class _Choice(msgspec.Struct):
    text: str


class _Event(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
    system_fingerprint: str = ""  # of a stand-in: its name


def requests_of_workers(url: str) -> list[int]:
    """How many requests the gateway has sent to each of its workers."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return [
            int(float(sent))
            for sent in re.findall(r"^bough_gateway_attempts_total{.*} (.+)$", answer.read().decode(), re.M)
        ]


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
            answer, figures = await _ask(client, prompt, turn)
            served.append(figures)
            history = prompt + answer


async def _ask(client: HttpClient, prompt: str, turn: Turn) -> tuple[str, Served]:
    reader, found, first_s = EventReader(), list[bytes](), 0.0
    sent_s = time.perf_counter()

    def on_data(data: bytes) -> None:
        nonlocal first_s
        found.extend(reader.feed(data))
        if found:
            first_s = first_s or time.perf_counter() - sent_s

    body = {"prompt": prompt, "max_tokens": turn.output_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        answer = await client.post("/v1/completions", body, on_data)
        if answer.status != 200:
            raise EngineDeadError(f"The gateway answered {answer.status}: {answer.text[:300]}")
        total_s = time.perf_counter() - sent_s
        events = [msgspec.json.decode(event, type=_Event) for event in found]
    except (HttpFailure, msgspec.MsgspecError) as error:
        raise EngineDeadError(f"A request of the benchmark failed: {error}") from None
    usage = events[-1].usage if events else None
    if usage is None:
        raise EngineDeadError(f"An answer of the benchmark tells no usage: {found[-1:]}")
    return "".join(choice.text for event in events for choice in event.choices), Served(
        worker=events[-1].system_fingerprint,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        expected_cached=None,
        output_tokens=usage.completion_tokens,
        sent_s=sent_s,
        first_s=first_s,
        total_s=total_s,
    )

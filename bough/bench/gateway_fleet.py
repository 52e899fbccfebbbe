"""Starts what `bough bench gateway` measures: stand-in workers and a real gateway before them, and always ends them."""

from __future__ import annotations

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

from bough.bench.gateway_model import Costs
from bough.bench.gateway_worker import WorkerSpec
from bough.bench.sampled import PATIENCE_S, Profiles
from bough.core.child_environment import child_environment
from bough.core.errors import EngineDeadError
from bough.core.gateway_settings import GatewaySettings


@contextlib.contextmanager
def worker_processes(count: int, costs: Costs, event_tokens: int) -> Iterator[list[str]]:
    """The URLs of stand-ins that publish their cache events."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        urls: list[str] = []
        for number in range(count):
            base = f"ipc://{folder}/{number}"
            events = {"endpoint": f"{base}.events", "replay_endpoint": f"{base}.replays"}
            spec = WorkerSpec(f"worker-{number}", costs, json.dumps(events), event_tokens)
            process = stack.enter_context(_running(["-m", "bough.bench.gateway_worker"]))
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
    profiles: Profiles  # of its main process


@contextlib.contextmanager
def gateway_process(workers: Sequence[str], policy: str, processes: int = 1) -> Iterator[RunningGateway]:
    """A gateway with all of the workers in rotation."""
    settings = GatewaySettings(
        port=0, policy=policy, processes=processes, worker_urls=tuple(workers), log_level="warning"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "bough.bench.gateway_sampled", folder, msgspec.json.encode(settings).decode()]
        with _running(command) as process:
            url = _url_of(process)
            _wait_for_workers(url, len(workers))
            yield RunningGateway(url, process.pid, Profiles(process.pid, Path(folder), lambda: process.poll() is None))


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
            process.wait(PATIENCE_S)
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
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with urllib.request.urlopen(f"{url}/workers") as answer:
            workers = json.load(answer)["workers"]
        if sum(bool(worker["is_healthy"]) for worker in workers) == count:
            return
        if time.monotonic() > deadline:
            raise EngineDeadError(f"Not all workers came into rotation: {workers}")
        time.sleep(0.05)

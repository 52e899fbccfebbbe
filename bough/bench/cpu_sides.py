"""The measured processes of `bough bench cpu`: starting them, giving them loads, and how much memory they took.

Each side is a process of its own (with its children). Only one of them works at a time; the others wait for a line on
their standard input and use no core.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from bough.bench import cpu_llama_side
from bough.bench.cpu_cases import Case, Start, Timing
from bough.bench.cpu_child import Order
from bough.bench.cpu_peer import Peer
from bough.bench.cpu_step_costs import cpu_of
from bough.core.child_environment import child_environment
from bough.core.errors import EngineDeadError

PATIENCE_S = 30.0

Answer = TypeVar("Answer", Start, Timing)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared, and how its process is started."""

    name: str
    title: str
    command: tuple[str, ...]


def bough_side(name: str, title: str) -> Side:
    return Side(name, title, (sys.executable, "-P", "-m", f"bough.bench.cpu_{name}_side"))


def llama_side(peer: Peer) -> Side:
    script = Path(cpu_llama_side.__file__)
    return Side("llama.cpp", f"llama.cpp (llama-cpp-python {peer.version})", (str(peer.python), "-P", str(script)))


class RunningSide:
    """A side's process."""

    def __init__(self, side: Side, model: str, threads: int, settings: dict[str, Any]) -> None:
        self.side = side
        spawned = time.monotonic()
        self._process = subprocess.Popen(
            side.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
        )
        self._peaks: dict[int, int] = {}
        start = self._ask(Order(model, threads, spawned, settings), Start)
        self.start = msgspec.structs.replace(start, cpu_s=sum(map(cpu_of, self._tree())))

    def run(self, case: Case) -> Timing:
        return self._ask(case, Timing)

    def peak_bytes(self) -> int:
        """The most memory that each of its processes has held so far, together."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._tree():
                self._peaks[process.pid] = peak_of(process.pid)
        return sum(self._peaks.values())

    def _tree(self) -> list[psutil.Process]:
        """The process and all that it has started."""
        top = psutil.Process(self._process.pid)
        return [top, *top.children(recursive=True)]

    def end(self) -> None:
        """Its input ends, and so does it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, order: Order | Case, answer: type[Answer]) -> Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which its answer shows
            self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EngineDeadError(f"The measured process of {self.side.title} has died; its last words are above.")
        return msgspec.json.decode(line, type=answer)


@contextlib.contextmanager
def running(side: Side, model: str, threads: int, settings: dict[str, Any]) -> Iterator[RunningSide]:
    process = RunningSide(side, model, threads, settings)
    try:
        yield process
    finally:
        process.end()


def peak_of(pid: int) -> int:
    """Linux keeps the mark; elsewhere what is held at the moment must do."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return int(psutil.Process(pid).memory_info().rss)
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)

"""What the measured processes of `bough bench cpu` have in common: one line of JSON in, one line of JSON out.

A side starts, tells how long that took, and then runs one load for each line that it reads, until its input ends. It is
idle otherwise, so that the sides can take turns without disturbing each other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bough.bench.cpu_cases import Case, Start, Timing
from bough.core.errors import BoughError


class Order(msgspec.Struct, frozen=True):
    """What a side is started with: the model, the threads, and when its process was begun (monotonic clock)."""

    model: str
    threads: int
    spawned: float
    settings: dict[str, Any]


class Stopwatch:
    """Splits the time since `began` into named parts."""

    def __init__(self, began: float) -> None:
        self._last = began
        self.parts: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.parts.append((name, now - self._last))
        self._last = now

    def split(self, part: str, end: str, seconds: float) -> None:
        """Gives the end of a part, so many seconds of it, a name of its own."""
        at = [name for name, _ in self.parts].index(part)
        self.parts[at : at + 1] = [(part, self.parts[at][1] - seconds), (end, seconds)]


def run_side(main: Callable[[], None]) -> None:
    """An error that is written for the user is shown as one sentence."""
    try:
        main()
    except BoughError as error:
        sys.exit(f"bough: {error}")


def read_order() -> Order:
    return msgspec.json.decode(sys.stdin.readline(), type=Order)


def serve(start: Stopwatch, run: Callable[[Case], Timing]) -> None:
    """Tells of the start, then answers loads until the input ends."""
    _say(Start(start.parts))
    for line in sys.stdin:
        _say(run(msgspec.json.decode(line, type=Case)))


def _say(answer: Start | Timing) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()

"""Bough's measured process in `bough bench cpu`: an `Engine` with its processes, as users have it.

It reads an `Order`, starts, says how long that took, and then runs one load for each line that it reads, until its
input ends. It is idle otherwise, so that the measured processes take turns without disturbing each other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bough.core.errors import BoughError
from tests.bench.cpu_cases import Case, Order, Start, Timing

FIRST_PROMPT = [1, 2, 3, 4]
PROCESSES = "processes and their imports"


class Stopwatch:
    """Splits the time since `began` into named parts."""

    def __init__(self, began: float) -> None:
        self._last = began
        self.parts: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.parts.append((name, now - self._last))
        self._last = now


def read_order() -> Order:
    return msgspec.json.decode(sys.stdin.readline(), type=Order)


def serve(start: Stopwatch, run: Callable[[Case], Timing]) -> None:
    """Reports the start, then runs loads until the input ends."""
    _say(Start(start.parts))
    for line in sys.stdin:
        _say(run(msgspec.json.decode(line, type=Case)))


def _say(answer: Start | Timing) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


def main() -> None:
    order = read_order()
    watch = Stopwatch(order.spawned)
    from bough.launch.engine import Engine  # timed: it is part of a start

    watch.lap("imports")
    with Engine(**{**order.settings, "model": order.model, "cpu_threads": order.threads}) as engine:
        watch.lap(PROCESSES)
        engine.generate(input_ids=FIRST_PROMPT, sampling_params=greedy(1))
        watch.lap("first token")
        load_s = engine.get_server_info()["load_time_s"]
        watch.parts[1:2] = [(PROCESSES, watch.parts[1][1] - load_s), ("load", load_s)]
        serve(watch, lambda case: run_case(engine, case))


def greedy(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


def run_case(engine: Any, case: Case) -> Timing:
    """The load on an empty cache. Only a single request is streamed: there, the first token is timed."""
    engine.flush_cache()
    prompts = [case.prefix + prompt for prompt in case.prompts]
    began = time.perf_counter()
    if len(prompts) > 1:
        engine.generate(input_ids=prompts, sampling_params=greedy(case.output_tokens))
        done = time.perf_counter()
        return Timing(done - began, done - began)
    pieces = engine.generate(input_ids=prompts[0], sampling_params=greedy(case.output_tokens), stream=True)
    first_tokens = next(pieces)["meta_info"]["completion_tokens"]
    first = time.perf_counter()
    for _ in pieces:
        pass
    return Timing(first - began, time.perf_counter() - began, first_tokens)


if __name__ == "__main__":
    try:
        main()
    except BoughError as error:
        sys.exit(f"bough: {error}")

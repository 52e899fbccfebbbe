"""Times the scheduler's loop by itself: `PYTHONPATH=. python tests/scheduler/bench_loop.py [rows]`.

The executor answers at once and nobody reads the messages, so what remains is planning and committing a steady step.
Prints the microseconds of a turn, the least and the median of several runs of a thousand.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time

import numpy as np

from bough.core.sampling_params import SamplingParams
from bough.core.settings import Settings
from bough.messages.requests import Generate, ToScheduler
from bough.scheduler.loop import Scheduler
from tests.bench.null_executor import NullExecutor

CONTEXT, PROMPT, RUNS, TURNS = 32_768, 128, 15, 1000


class Requests:
    """All there will be, at once."""

    def __init__(self, rows: int) -> None:
        sampling = SamplingParams(max_new_tokens=CONTEXT - PROMPT, ignore_eos=True)
        prompt = np.arange(PROMPT, dtype=np.int32).tobytes()
        self._waiting: list[ToScheduler] = [
            Generate(handle=n, rid=str(n), input_ids=prompt, sampling=sampling, seed=0, stream=True)
            for n in range(rows)
        ]

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        arrived, self._waiting = self._waiting, []
        return arrived


class Nobody:
    """Where messages go."""

    def tokens(self, message: object) -> None:
        pass

    def reply(self, message: object) -> None:
        pass


def main(rows: int) -> None:
    settings = Settings.from_flat({})
    executor = NullExecutor(CONTEXT, 32_000)
    loop = Scheduler(executor, Requests(rows), Nobody(), memory=settings.memory, settings=settings.scheduler)
    for _ in range(50):
        loop.turn()
    gc.freeze()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        for _ in range(TURNS):
            loop.turn()
        times.append(1e6 * (time.perf_counter() - began) / TURNS)
    print(f"{rows} rows: {min(times):.0f} us a turn at least, {statistics.median(times):.0f} at the median")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

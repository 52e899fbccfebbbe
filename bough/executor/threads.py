"""How many threads compute: as many as help, found out by trying where that can differ.

A decode step reads every weight once, and a few cores can use up the memory's bandwidth; more threads then only wait
for each other, and leave no core to the engine's other processes. On a machine with few cores all of them compute.
The choice is a pure function of measured times; the rehearsal that measures them uses pages and rows that nobody owns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from bough.core.plan import Limits
from bough.executor.plain_plans import decode_plan, prompt_plan
from bough.executor.threaded import SynchronousExecutor, no_masks

FEW_CORES = 4  # up to here every core helps, and a measurement on a busy machine would only mislead
TOLERANCE = 0.05  # a time within this of the best is as good
PROMPT_TOKENS = 64
DECODES = 8
TRIALS = 3
PATIENCE_S = 2.0  # a large model gets fewer trials rather than a late start

Clock = Callable[[], float]


def thread_candidates(cores: int) -> tuple[int, ...]:
    """Numbers of threads worth trying: all cores, one less, three quarters and half of them."""
    if cores <= FEW_CORES:
        return (cores,)
    return tuple(sorted({cores, cores - 1, cores * 3 // 4, cores // 2}, reverse=True))


def choose_threads(seconds: Mapping[int, float]) -> int:
    """The fewest threads that are about as fast as the fastest; `seconds` is the time of the same work by threads."""
    best = min(seconds.values())
    return min(threads for threads, taken in seconds.items() if taken <= best * (1 + TOLERANCE))


def measure_threads(
    executor: SynchronousExecutor, set_threads: Callable[[int], None], cores: int, clock: Clock = time.perf_counter
) -> int:
    """Tries the candidates in turn, several times, sets the best number and returns it. The executor is unused yet."""
    candidates, prompt = thread_candidates(cores), _prompt_tokens(executor.limits())
    if len(candidates) == 1 or prompt < 1:
        set_threads(cores)
        return cores
    seconds = dict.fromkeys(candidates, float("inf"))
    began = clock()
    for trial in range(TRIALS):
        if trial and clock() - began > PATIENCE_S:
            break
        for threads in candidates:
            set_threads(threads)
            seconds[threads] = min(seconds[threads], _rehearse(executor, prompt, clock))
    chosen = choose_threads(seconds)
    set_threads(chosen)
    return chosen


def _prompt_tokens(limits: Limits) -> int:
    """As many as there is room for, in front of the decodes; page 0 belongs to nobody."""
    room = min(limits.context_length, (limits.pages[0] - 1) * limits.page_size)
    return min(PROMPT_TOKENS, limits.chunk_tokens, room - DECODES)


def _rehearse(executor: SynchronousExecutor, prompt: int, clock: Clock) -> float:
    """A short prompt and a few decodes behind it."""
    limits = executor.limits()
    pages = np.arange(1, 2 + (prompt + DECODES - 1) // limits.page_size, dtype=np.int32)
    began = clock()
    executor.run(prompt_plan(0, _some_tokens(limits, prompt), pages, limits.pages, limits.groups), no_masks)
    for step in range(DECODES):
        executor.run(decode_plan(step, 1, len(limits.pages)), no_masks)
    return clock() - began


def _some_tokens(limits: Limits, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(count, dtype=np.int32) % limits.vocab_size

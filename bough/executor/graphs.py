"""CUDA graphs of steps at a ladder of sizes, captured only after the engine answers.

A step runs eagerly until its size has a graph. Graphs are captured one at a time, when nothing is in flight: in idle
moments until the ladder is complete, smallest first, and under load at most one every `PAUSE_STEPS` steps, of a size
that comes back. All share one memory pool: only one graph runs at a time.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from bough.core.plan import Limits

log = logging.getLogger(__name__)

PAUSE_STEPS = 32  # a capture takes as long as a few steps of its size, in which every stream stands still
USES_BEFORE_CAPTURE = 2  # under load, a size must have shown that it comes back
# Where a step's work takes at most so many times as long as launching it. Up to FINE_TOKENS the device would not wait
# for the host in the longer of these, but streams would: nothing is sent while a step is launched.
WORTH_A_GRAPH = 3.0
WORTH_A_LARGE_GRAPH = 1.25
FINE_TOKENS = 3072
FINE_STEP = 64  # products are cut into tiles of at least so many rows, so that padding to these costs next to nothing
MEASUREMENTS = 2  # of which the better counts
TIMED_SIZE = 1024  # up to here, a graph may take longer than that of a larger step: libraries choose badly for some
QUICKER = 0.98  # of a rung's time: if the next one takes less than this, twice, it is taken in its place

Output = TypeVar("Output")
Graph = TypeVar("Graph")


def decode_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph of their own; padding to the next costs little at any size."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(544, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


def mixed_sizes(chunk: int, largest: int) -> list[int]:
    """Token counts worth a graph: steps of about an eighth, finer ones where streams run beside prompts. A full chunk
    fits exactly, and so do those with decodes beside it, up to `largest`."""
    sizes, size = [], 16
    while size < chunk:
        sizes.append(size)
        eighth = max(16, 1 << (size.bit_length() - 4))
        size += min(eighth, FINE_STEP) if size < FINE_TOKENS else eighth
    beside = [chunk + step for step in (0, 64, 128, 256) if chunk + step < largest]
    return sorted({*sizes, *beside, largest})


def cut_sizes(limits: Limits) -> list[int]:
    """Token counts that steps are cut to while streams run beside their prompts, in as far as they have graphs."""
    if limits.even_tokens == 1:
        return []
    return list(range(2 * limits.even_tokens, min(FINE_TOKENS, limits.chunk_tokens) + 1, limits.even_tokens))


def waits_for_host(size: int, run: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether launching this work of so many tokens, kernel by kernel, takes so much of its time that a graph pays."""
    worth = WORTH_A_GRAPH if size <= FINE_TOKENS else WORTH_A_LARGE_GRAPH
    return min(_work_per_launch(run, clock) for _ in range(MEASUREMENTS)) <= worth


def _work_per_launch(run: Callable[[], object], clock: Callable[[], float]) -> float:
    torch.cuda.synchronize()
    began = clock()
    run()
    launched = clock()
    torch.cuda.synchronize()
    return (clock() - began) / (launched - began)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Which steps are captured: rows of decode steps, tokens of steps with prompts, and rows of decode steps with few
    keys, where these have kernels of their own."""

    decode: Sequence[int] = ()
    mixed: Sequence[int] = ()
    few_keys: Sequence[int] = ()


class Captured(Generic[Output]):
    """One graph: what it computes stays valid until any other graph of the pool is replayed."""

    def __init__(self, run: Callable[[], Output], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = run()

    def replay(self) -> Output:
        """Queues the work."""
        self._graph.replay()
        return self._output


def replay_s(replay: Callable[[], object]) -> float:
    """How long a captured step takes."""
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    replay()
    done.record()
    done.synchronize()
    return 1e-3 * float(begun.elapsed_time(done))


class Pauses:
    """When a capture may interrupt the load: shared by all ladders of an executor."""

    def __init__(self) -> None:
        self._steps_since_capture = PAUSE_STEPS

    def step(self) -> None:
        self._steps_since_capture += 1

    @property
    def due(self) -> bool:
        return self._steps_since_capture >= PAUSE_STEPS

    def captured(self) -> None:
        self._steps_since_capture = 0


class Ladder(Generic[Graph]):
    """Owns the graphs of one kind of step. `capture(size)` makes one when nothing is in flight; None means that a graph
    of this size would not pay, as far as it could be measured.

    One such answer may be an accident (a neighbour at work, a clock that is still low): the rung is left out, and its
    steps are padded to the next. Where two rungs in a row do not pay, the ladder ends below them. Steps are also padded
    to the next rung where its graph is quicker, as far as `time_s(size, graph)` tells, which runs it without effect.
    """

    def __init__(
        self,
        kind: str,
        sizes: Sequence[int],
        capture: Callable[[int], Graph | None],
        pauses: Pauses,
        time_s: Callable[[int, Graph], float],
    ) -> None:
        self._kind = kind
        self._sizes = list(sizes)
        self._capture = capture
        self._pauses = pauses
        self._time_s = time_s
        self._graphs: dict[int, Graph] = {}
        self._instead: dict[int, int] = {}  # the quicker rung, for those that have one
        self._refused: set[int] = set()
        self._outdated: set[int] = set()  # captured with what is known to be slower by now
        self._told = False  # how far the ladder goes
        self._uses: Counter[int] = Counter()

    def find(self, count: int) -> tuple[int, Graph] | None:
        """The rung that so many rows or tokens are padded to, with its graph; None where there is none yet. Captures it
        if it is time to."""
        self._pauses.step()
        size = next((size for size in self._sizes if size >= count and size not in self._refused), None)
        if size is None:
            return None
        self._uses[size] += 1
        if size not in self._graphs and self._uses[size] > USES_BEFORE_CAPTURE and self._pauses.due:
            self._add(size)
        if size not in self._graphs:
            return None
        while size in self._instead:
            size = self._instead[size]
        return size, self._graphs[size]

    def clear(self) -> None:
        """Forgets all graphs; they are captured again when they are due."""
        self._graphs.clear()
        self._instead.clear()
        self._outdated.clear()
        self._uses.clear()

    def outdate(self, changed: Callable[[int], bool]) -> None:
        """Rungs that were captured with what has changed are to be captured again; until then they are used."""
        self._outdated.update(size for size in self._graphs if changed(size))

    def capture_next(self) -> bool:
        """Captures the smallest rung that is missing or outdated; False when none is."""
        current = self._graphs.keys() - self._outdated
        missing = [size for size in self._sizes if size not in current and size not in self._refused]
        if missing:
            self._add(missing[0])
        elif self._graphs and not self._told:
            self._told = True
            log.info("all %d %s graphs are captured, up to size %d", len(self._graphs), self._kind, max(self._graphs))
        return bool(missing)

    def _add(self, size: int) -> None:
        torch.cuda.synchronize()
        began = time.monotonic()
        graph = self._capture(size)
        self._pauses.captured()
        self._outdated.discard(size)
        if graph is None:
            if size not in self._graphs:
                self._refuse(size)
            return
        self._graphs[size] = graph
        self._compare(size)
        log.debug("captured the %s graph of size %d in %.0f ms", self._kind, size, 1e3 * (time.monotonic() - began))

    def _compare(self, size: int) -> None:
        """Times this rung beside those next to it: at another time the device may have another clock."""
        if size > TIMED_SIZE:
            return
        self._time(size)  # the first time takes longer
        captured = sorted(other for other in self._graphs if other <= TIMED_SIZE)
        for lower, upper in itertools.pairwise(captured):
            if size in (lower, upper):
                quicker = all(self._is_quicker(lower, upper) for _ in range(2))
                self._instead.pop(lower, None)
                if quicker:
                    self._instead[lower] = upper

    def _is_quicker(self, lower: int, upper: int) -> bool:
        return self._time(upper) < QUICKER * self._time(lower)

    def _time(self, size: int) -> float:
        return self._time_s(size, self._graphs[size])

    def _refuse(self, size: int) -> None:
        """Leaves out a rung, and ends the ladder where its neighbour is left out too."""
        self._refused.add(size)
        log.debug("no %s graph of size %d: its work takes much longer than its launching", self._kind, size)
        place = self._sizes.index(size)
        for lower, upper in itertools.pairwise(self._sizes[max(place - 1, 0) : place + 2]):
            if {lower, upper} <= self._refused:
                self._sizes = [kept for kept in self._sizes if kept < lower]
                log.info(
                    "no %s graphs from size %d on: their work takes much longer than their launching", self._kind, lower
                )
                return

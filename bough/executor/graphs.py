"""CUDA graphs of steps at fixed sizes, captured only after the engine answers.

A step runs eagerly until its size has a graph; launching a step never captures one. Graphs are captured one at a time:
in idle moments until all sizes are there, those that were used most first, and under load when the scheduler makes a
pause between steps, of a size that comes back. All share one memory pool: only one graph runs at a time.

Which sizes there are follows from tables, and which of them are captured under load from the plans, never from a time:
ranks that run the same plans take the same graphs, and their collectives have the same shapes.
"""

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)

USES_BEFORE_CAPTURE = 2  # under load, a size must have shown that it comes back
# While a step with prompts is launched kernel by kernel, for 12 to 24 ms, no stream is sent anything. Larger steps of a
# large model keep the device busy for much longer, and padding them to a graph's size would cost more than it gains.
FINE_TOKENS = 3072
FINE_STEP = 64  # products are cut into tiles of at least so many rows, so that padding to these costs next to nothing
LAUNCH_WORK = 1.5e11  # a layer's weights times tokens: its products take as long as launching its kernels
SLOW_SIZES = (448, 480)  # libraries choose tiles for these that take longer than those for 512

Output = TypeVar("Output")
Graph = TypeVar("Graph")


def decode_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph of their own; padding to the next costs little at any size."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(544, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


def mixed_sizes(chunk: int, largest: int, layer_weights: int) -> list[int]:
    """Token counts of steps with prompts that are worth a graph, for a model with so many weights in a layer: steps
    of about an eighth, finer ones where streams run beside prompts. A full chunk fits exactly, and so do those with
    decodes beside it, up to `largest`."""
    sizes, size = [], 16
    while size < chunk:
        if size not in SLOW_SIZES:
            sizes.append(size)
        eighth = max(16, 1 << (size.bit_length() - 4))
        size += min(eighth, FINE_STEP) if size < FINE_TOKENS else eighth
    beside = [chunk + step for step in (0, 64, 128, 256) if chunk + step < largest]
    most = max(FINE_TOKENS, LAUNCH_WORK / layer_weights)
    return sorted(size for size in {*sizes, *beside, largest} if size <= most)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Which steps are captured: rows of decode steps, tokens of steps with prompts, and rows of decode steps with few
    keys, and of those that read shared prefixes once, where these have kernels of their own."""

    decode: Sequence[int] = ()
    mixed: Sequence[int] = ()
    few_keys: Sequence[int] = ()
    shared: Sequence[int] = ()
    drafted: Mapping[int, Sequence[int]] = field(default_factory=dict)  # rows with drafts, by the tokens of each
    drafted_few: Mapping[int, Sequence[int]] = field(default_factory=dict)  # the same with few keys
    scratch_bytes: int = 0  # that the largest of them needs while it runs
    adapted: bool = False  # whether `decode` and `mixed` are captured a second time, for rows with adapters

    @property
    def count(self) -> int:
        """Graphs in all: decode steps have a second one, for sampling."""
        plain = 2 * sum(map(len, (self.few_keys, self.shared, *self.drafted.values(), *self.drafted_few.values())))
        return plain + (1 + self.adapted) * (2 * len(self.decode) + len(self.mixed))


class Captured(Generic[Output]):
    """One graph, with what it computes."""

    def __init__(self, run: Callable[[], Output], pool: Any) -> None:
        self._graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what it frees may be on the device, where a call in the middle of a capture ends the capture
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._output = run()
        finally:
            if collects:
                gc.enable()

    def replay(self) -> Output:
        """Queues the work."""
        self._graph.replay()
        return self._output


class GraphMemory:
    """Owns the memory that all graphs of an executor compute in, one at a time.

    torch never joins blocks of a pool that it got at different times, so graphs that are captured smallest first would
    each take a block of their own. The first graph therefore takes one block for the largest and leaves it to all.
    """

    def __init__(self, scratch_bytes: int, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._scratch_bytes = scratch_bytes
        self._device = device
        self._first: Captured[None] | None = None  # holds the block; it is never replayed

    def capture(self, run: Callable[[], Output]) -> Captured[Output]:
        """What `run` returns must be small, or lie outside the graphs' memory: it is kept."""
        if self._first is None:
            self._first = Captured(self._take_block, self._pool)
        return Captured(run, self._pool)

    def _take_block(self) -> None:
        torch.zeros(max(1, self._scratch_bytes), dtype=torch.uint8, device=self._device)


class CudaGraphs(Generic[Graph]):
    """Owns the graphs of one kind of step. `capture(size)` makes one."""

    def __init__(self, kind: str, sizes: Sequence[int], capture: Callable[[int], Graph]) -> None:
        self._kind = kind
        self._sizes = list(sizes)
        self._capture = capture
        self._graphs: dict[int, Graph] = {}
        self._uses: Counter[int] = Counter()

    def find(self, count: int) -> tuple[int, Graph] | None:
        """The size that so many rows or tokens are padded to, with its graph; None where there is none yet."""
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            return None
        self._uses[size] += 1
        return (size, self._graphs[size]) if size in self._graphs else None

    def clear(self) -> None:
        """Forgets all graphs; they are captured again when they are due."""
        self._graphs.clear()
        self._uses.clear()

    @property
    def most_wanted(self) -> tuple[int, int]:
        """How often the missing size that is used most was, and that size, the smallest of several; -1: none is
        missing."""
        missing = ((self._uses[size], -size) for size in self._sizes if size not in self._graphs)
        uses, size = max(missing, default=(-1, 0))
        return uses, -size

    def capture_next(self, least: int = 0) -> bool:
        """Captures the size that is wanted most, if it was used so often; False when none is."""
        uses, size = self.most_wanted
        if uses < least:
            return False
        torch.cuda.synchronize()
        began = time.monotonic()
        self._graphs[size] = self._capture(size)
        log.debug("captured the %s graph of size %d in %.0f ms", self._kind, size, 1e3 * (time.monotonic() - began))
        if len(self._graphs) == len(self._sizes):
            log.info("all %d %s graphs are captured, up to size %d", len(self._sizes), self._kind, self._sizes[-1])
        return True

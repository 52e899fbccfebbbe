"""CUDA graphs of decode steps at a ladder of batch sizes, captured only after the engine answers.

A step runs eagerly until its size has a graph. Graphs are captured one at a time, when nothing is in flight: in idle
moments until the ladder is complete, smallest first, and under load at most one every `PAUSE_STEPS` steps, the size
that is used most. All share one memory pool: only one graph runs at a time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

PAUSE_STEPS = 32  # a capture takes tens of milliseconds, in which every stream stands still
USES_BEFORE_CAPTURE = 2  # under load, a size must have shown that it comes back


def ladder(largest: int) -> list[int]:
    """Batch sizes worth a graph of their own; padding to the next costs little at any size."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16), *range(544, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


class Captured:
    """The graphs of one batch size: the forward pass, and the sampling of rows that ask for nothing special."""

    def __init__(
        self, run: Callable[[], torch.Tensor], sample: Callable[[torch.Tensor], torch.Tensor], pool: Any
    ) -> None:
        self._forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool, capture_error_mode="thread_local"):
            self._logits = run()
        self._sampling = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._sampling, pool=pool, capture_error_mode="thread_local"):
            self._tokens = sample(self._logits)

    def forward(self) -> torch.Tensor:
        """Queues the forward pass; its logits stay valid until the next."""
        self._forward.replay()
        return self._logits

    def sample(self) -> torch.Tensor:
        """Queues the sampling behind it; the tokens stay valid until the next."""
        self._sampling.replay()
        return self._tokens


class DecodeGraphs:
    """Owns the graphs. `run(size)` computes the logits of the step in the persistent buffers, `sample(size, logits)`
    draws its tokens, `pad` empties the buffers."""

    def __init__(
        self,
        run: Callable[[int], torch.Tensor],
        sample: Callable[[int, torch.Tensor], torch.Tensor],
        pad: Callable[[], None],
        largest: int,
    ) -> None:
        self._run = run
        self._sample = sample
        self._pad = pad
        self._sizes = ladder(largest)
        self._graphs: dict[int, Captured] = {}
        self._uses: Counter[int] = Counter()
        self._steps_since_capture = PAUSE_STEPS
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def complete(self) -> bool:
        return len(self._graphs) == len(self._sizes)

    def size_for(self, batch: int) -> int:
        """The rung that a batch is padded to; the batch itself where it is beyond the ladder."""
        return next((size for size in self._sizes if size >= batch), batch)

    def find(self, size: int) -> Captured | None:
        """The graph of this rung, if there is one yet; notes that it was wanted."""
        self._uses[size] += 1
        self._steps_since_capture += 1
        return self._graphs.get(size)

    def wants_pause(self, size: int) -> bool:
        """Whether it is time to capture this size, although there is work to do."""
        return (
            size in self._sizes
            and size not in self._graphs
            and self._uses[size] >= USES_BEFORE_CAPTURE
            and self._steps_since_capture >= PAUSE_STEPS
        )

    def capture_next(self) -> bool:
        """Captures the smallest rung that is missing; False when none is."""
        missing = [size for size in self._sizes if size not in self._graphs]
        if missing:
            self.capture(missing[0])
        return bool(missing)

    def capture(self, size: int) -> None:
        """Nothing may be in flight. The step is first run eagerly on padding, so that every kernel is compiled and
        every buffer allocated."""
        began = time.monotonic()
        self._pad()
        self._sample(size, self._run(size))
        torch.cuda.synchronize()
        self._graphs[size] = Captured(lambda: self._run(size), lambda logits: self._sample(size, logits), self._pool)
        self._steps_since_capture = 0
        log.debug("captured the decode graphs of size %d in %.0f ms", size, 1e3 * (time.monotonic() - began))

"""The blocks of vision towers in CUDA graphs: launched kernel by kernel, a few images take the host several times as
long as the device, and no stream is sent anything meanwhile.

A graph has a fixed number of patches, and of items within which they attend: windows, or whole images. Fewer are filled
up, with patches of no item and items of no patches.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bough.executor.graphs import Captured, CudaGraphs
from bough.loader.encoders import longest_of

SIZES = (*range(256, 769, 128), *range(1024, 2049, 256), *range(2560, 4097, 512), *range(5120, 8193, 1024))
WINDOW = 64  # patches that no item has more of where it is a window
EACH = {True: 8, False: 64}  # patches of a window and of an image, at least, on average
log = logging.getLogger(__name__)
Turns = tuple[torch.Tensor, torch.Tensor]


class VisionGraphs:
    """Takes the place of a tower's blocks. `capture` makes a graph of what a function queues."""

    def __init__(self, tower: Any, capture: Callable[[Callable[[], None]], Captured[None]]) -> None:
        self._tower, self._capture_one = tower, capture
        self._blocks: list[Callable[..., torch.Tensor]] = [block.forward for block in tower.blocks]
        self._windows = list[bool]()  # for each block, whether its items are windows
        self._calls: list[tuple[torch.Tensor, torch.Tensor, Turns]] | None = None  # while they are written down
        self._found: tuple[int, list[Captured[None]]] | None = None  # for the images that are computed now
        self._held: dict[bool | None, torch.Tensor] = {}  # whose copies the bounds and the turns are
        self.graphs = CudaGraphs("vision", SIZES, self._capture)
        for number, block in enumerate(tower.blocks):
            block.forward = partial(self._run, number)

    def _run(self, number: int, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        cu_seqlens, position_embeddings = given["cu_seqlens"], given["position_embeddings"]
        if self._calls is not None:
            self._calls.append((hidden, cu_seqlens, position_embeddings))
        elif number == 0:
            found = self.graphs.find(len(hidden))
            self._found = found if found is not None and found[1] else None
        if not self._found or self._calls is not None or len(cu_seqlens) > self._room(number, self._found[0]):
            return self._blocks[number](hidden, **given)
        kind = self._windows[number]
        if hidden.data_ptr() != self._x.data_ptr():
            self._x[: len(hidden)] = hidden
        if self._held.get(None) is not position_embeddings[0]:
            self._held[None] = position_embeddings[0]
            for buffer, turn in zip(self._turns, position_embeddings, strict=True):
                buffer[: len(hidden)] = turn
        if self._held.get(kind) is not cu_seqlens:
            self._held[kind] = cu_seqlens
            self._bounds[kind].fill_(len(hidden))
            self._bounds[kind][: len(cu_seqlens)] = cu_seqlens
        self._found[1][number].replay()
        return self._x[: len(hidden)]

    def _room(self, number: int, size: int) -> int:
        return size // EACH[self._windows[number]] + 1

    def _capture(self, size: int) -> list[Captured[None]]:
        """Computes an image of that size first: what it calls blocks with shows what they take."""
        weight, self._calls = self._tower.patch_embed.proj.weight, []
        try:
            self._tower(weight.new_zeros(size, weight[0].numel()), weight.new_tensor([[1, 16, size // 16]]).long())
        except torch.OutOfMemoryError:
            log.warning("images of %d patches are computed without a graph: the device has no memory for one", size)
            return []
        finally:
            calls, self._calls = self._calls, None
        if not self._windows:
            (hidden, bounds, turns), most = calls[0], SIZES[-1]
            self._x = hidden.new_zeros(most, hidden.shape[1])
            self._turns = tuple(turn.new_zeros(most, turn.shape[1]) for turn in turns)
            self._bounds = {kind: bounds.new_zeros(most // each + 1) for kind, each in EACH.items()}
            self._windows = [longest_of(bounds) <= WINDOW for _, bounds, _ in calls]
        return [self._capture_one(partial(self._compute, number, size)) for number in range(len(self._blocks))]

    def _compute(self, number: int, size: int) -> None:
        """In place of the block's input."""
        kind, x, turns = self._windows[number], self._x[:size], tuple(turn[:size] for turn in self._turns)
        bounds = self._bounds[kind][: self._room(number, size)]
        given = {"cu_seqlens": bounds, "position_embeddings": turns, "max_seqlen": WINDOW if kind else size}
        x.copy_(self._blocks[number](x, **given))

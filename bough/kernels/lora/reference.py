"""What adapters add, in plain torch, and how the rows of a step are grouped by their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

TILE = 1024  # outputs that one program adds to, or four where rows are few
LEAST_RANK = 16  # that tensor cores multiply
FEW_ROWS, MANY_ROWS = 16, 64  # of a slot that one program takes
MOST_FEW = 512  # rows of a step that is cut into small blocks
MAX_RANK = 256  # of adapters; BOUGH_MAX_RANK of lora.h
TILE_ROWS = 16  # of linear_tile.h

Ints = npt.NDArray[np.int32]
Tokens = slice | torch.Tensor  # places in a step


class AdapterStack(NamedTuple):
    """The thin matrices that all slots hold for one layer, whose outputs are those of one matrix or of several. Of each
    only the first `ranks` are ever read. A slot may hold them for each of a layer's experts, one behind the other. Both
    may be strided: matrices of several heads may be one."""

    down: torch.Tensor  # [slots * experts, matrices, rank, inputs]
    up: torch.Tensor  # [slots * experts, lines, rank], scaled
    ranks: torch.Tensor  # [slots, matrices] int32; 0: the slot leaves this matrix alone
    tiles: torch.Tensor  # [tiles, 4] int32, see `tiles_of`
    experts: int = 1
    step: int = 0  # from the inputs of one matrix to those of the next; 0: all have the same


class PackedStack(NamedTuple):
    """The same for the native CPU kernels, as `bough_lora` of lora.h has it."""

    thin: npt.NDArray[np.int64]  # [slots, experts or 1, matrices, 3]: addresses of A and B in tiles, and their rank
    inputs: int
    bands: npt.NDArray[np.int64]  # [matrices + 1] where the outputs of each begin
    step: int = 0  # as above
    gap: int = 0  # numbers between the outputs of one matrix and of the next


def to_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """[.., rows, inputs] as tiles [.., 16 rows each, inputs, row], padded with zeros."""
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[-2] % TILE_ROWS))
    return padded.view(*matrix.shape[:-2], -1, TILE_ROWS, matrix.shape[-1]).transpose(-1, -2).contiguous()


class GroupedRows(NamedTuple):
    """Rows that have adapters, by slot, in blocks that one program can take."""

    order: torch.Tensor  # [rows, or more] int32: places of rows, those of a slot together
    blocks: torch.Tensor  # [blocks, 3] int32: slots from 1 on, where in the order the block begins, and its rows
    slots: torch.Tensor  # [rows] int32; 0: none
    block_rows: int  # that a block has at most


class PairAdapters(NamedTuple):
    """What adapters add to the two products of a layer's experts, and the slots of the tokens."""

    gate_up: AdapterStack
    down: AdapterStack
    slots: torch.Tensor  # [tokens] int32


def tiles_of(bands: Sequence[slice], lines: Sequence[int] = ()) -> Ints:
    """The outputs in tiles that lie within one matrix: its number, the first of them, the end, and the first's line of
    `up`, of which each matrix has those from `lines` on, or those with the same numbers."""
    starts = [(n, start, band.stop) for n, band in enumerate(bands) for start in range(band.start, band.stop, TILE)]
    ahead = [line - band.start for line, band in zip(lines, bands, strict=True)] if lines else [0] * len(bands)
    return np.array([(n, at, min(at + TILE, stop), at + ahead[n]) for n, at, stop in starts], dtype=np.int32)


def group_rows(slots: torch.Tensor, most: int) -> GroupedRows:
    """Rows with these slots [rows] int32, of which there are `most`, and 0 is none. How large the results are depends
    on sizes alone, and nothing waits for the device, as a CUDA graph needs it."""
    own, order = slots.sort(stable=True)
    # How many of a slot one program takes.
    rows, at = FEW_ROWS if len(own) <= MOST_FEW else MANY_ROWS, torch.arange(len(own), device=own.device)
    first, end = (torch.searchsorted(own, own, right=right) for right in (False, True))
    begins = (own > 0) & ((at - first) % rows == 0)
    count = min(len(own), len(own) // rows + most)  # each slot may end in a block of its own
    blocks = torch.zeros(count + 1, 3, dtype=torch.int32, device=own.device)  # the last is for what begins no block
    found = torch.stack((own, at, (end - at).clamp(max=rows)), 1).int()
    # Where kernels are compiled and not launched, slots are what the memory held, and may be more than there are.
    blocks.index_copy_(0, (begins.cumsum(0) - 1).where(begins, count).clamp(max=count), found)
    return GroupedRows(order.int(), blocks[:count], slots, rows)


class AdapterRows:
    """Which tokens each adapter changes. After the last attention only `logits_indices` are left, so they are grouped
    among those, too."""

    def __init__(self, slots: torch.Tensor, ends: torch.Tensor, most: int) -> None:
        """The slots of all tokens and of those [rows] int32, of `most` that there are."""
        self._slots, self._ends, self._most = slots, ends, most
        self._parts: dict[Any, GroupedRows] = {}

    @property
    def tokens(self) -> GroupedRows:
        return self.at(slice(None))

    @cached_property
    def ends(self) -> GroupedRows:
        return group_rows(self._ends, self._most)

    def among(self, count: int, ends: torch.Tensor | None) -> GroupedRows:
        """Of so many rows, which are all tokens or those at `ends`. Where these are as many, they are the same."""
        return self.tokens if ends is None or len(ends) != count else self.ends

    def at(self, tokens: Tokens) -> GroupedRows:
        """Of rows that have the adapters of these tokens; layers that name the same ones share the groups."""
        key = tokens.indices(len(self._slots)) if isinstance(tokens, slice) else tokens
        if key not in self._parts:
            self._parts[key] = group_rows(self._slots[tokens], self._most)
        return self._parts[key]

    def cut(self, part: slice) -> AdapterRows:
        """Of some of the step's tokens, as a step."""
        return AdapterRows(self._slots[part], self._ends, self._most)


def group_pairs(ids: torch.Tensor, token_slots: torch.Tensor, stack: AdapterStack) -> GroupedRows:
    """Pairs of a token and an expert `ids` [tokens, per_token], by the token's slot and the expert: the slots of their
    blocks count the experts of all slots."""
    own = (token_slots[:, None] - 1) * stack.experts + ids + 1
    return group_rows(own.where(token_slots[:, None] > 0, 0).flatten(), len(stack.down))


def lora_(product: torch.Tensor, x: torch.Tensor, stack: AdapterStack, grouped: GroupedRows) -> None:
    """Adds to `product` [rows, outputs] what the adapters of the rows make of x [rows, inputs]."""
    for slot, first, count in grouped.blocks[grouped.blocks[:, 0] > 0].tolist():
        places = grouped.order[first : first + count]
        rows, ranks = x.index_select(0, places), stack.ranks[(slot - 1) // stack.experts].tolist()
        own = [rows[:, n * stack.step :][:, : stack.down.shape[3]] for n in range(len(ranks))]
        thin = [x @ down[:rank].T for x, down, rank in zip(own, stack.down[slot - 1], ranks, strict=True)]
        for matrix, begin, end, line in stack.tiles.tolist():
            if rank := ranks[matrix]:
                up = stack.up[slot - 1, line : line + end - begin, :rank]
                product[:, begin:end].index_add_(0, places, thin[matrix] @ up.T)

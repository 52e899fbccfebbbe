"""What adapters add, in plain torch, and how the rows of a step are grouped by their adapters."""

from typing import NamedTuple

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


class AdapterStack(NamedTuple):
    """The thin matrices that all slots hold for one layer, whose outputs are those of one matrix or of several. Of each
    only the first `ranks` are ever read. A slot may hold them for each of a layer's experts, one behind the other."""

    down: torch.Tensor  # [slots * experts, matrices, rank, inputs]
    up: torch.Tensor  # [slots * experts, outputs, rank], scaled
    ranks: torch.Tensor  # [slots, matrices] int32; 0: the slot leaves this matrix alone
    bands: tuple[slice, ...]  # the outputs of each matrix
    tiles: torch.Tensor  # [tiles, 3] int32, see `tiles_of`
    experts: int = 1


class PackedStack(NamedTuple):
    """The same for the native CPU kernels, as `bough_lora` of lora.h has it."""

    thin: npt.NDArray[np.int64]  # [slots, experts or 1, matrices, 3]: addresses of A and B in tiles, and their rank
    inputs: int
    bands: npt.NDArray[np.int64]  # [matrices + 1] where the outputs of each begin


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


def tiles_of(bands: tuple[slice, ...]) -> Ints:
    """The outputs in tiles that lie within one matrix: its number, the first of them and the end."""
    starts = [(n, start, band.stop) for n, band in enumerate(bands) for start in range(band.start, band.stop, TILE)]
    return np.array([(n, start, min(start + TILE, stop)) for n, start, stop in starts], dtype=np.int32)


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
        for number, (band, rank) in enumerate(zip(stack.bands, ranks, strict=True)):
            if rank:
                thin = rows @ stack.down[slot - 1, number, :rank].T
                product[:, band].index_add_(0, places, thin @ stack.up[slot - 1, band, :rank].T)

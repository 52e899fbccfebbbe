# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""How attention is shared out among programs, where nothing of it may show in the result.

Keys are cut at multiples of the *chunk*. A chunk is attended by itself and the chunks' results are merged in order, by
one program or by a second kernel: the arithmetic is the same to the bit. So a few long decodes are split over the
device and many short ones left whole, by a plan made on the device. A list of items begins with their number; an item
is a row's place in the batch, its first query, and the one chunk to attend, or -1 for all. `DecodeItems` belongs to one
window and one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from bough.kernels.decode_attention.work import oldest_seen
from bough.kernels.prefill_attention.triton import IntArray, query_blocks

ITEM_FIELDS = 3
SPLIT_ITEMS = 512  # that rows may be split into beyond one each; bounds the memory for partial results
PROGRAMS = 2 * 132  # enough to fill a large GPU
PLAN_TILE = 1024


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of single chunks, by item."""

    first_item: torch.Tensor  # [batch + 1] int32, where a row's items begin; a row with one item was not split
    totals: torch.Tensor  # [items, heads, head_dim] float32
    log_sums: torch.Tensor  # [items, heads] float32, in units of log2


class DecodeItems:
    """Items of a step of at most `max_batch` decodes, with room for the results of those that are split."""

    def __init__(
        self,
        max_batch: int,
        heads: int,
        head_dim: int,
        device: torch.device,
        *,
        chunk: int,
        window: int | None = None,
        chunked: bool = False,
        split_items: int = SPLIT_ITEMS,
    ) -> None:
        self.max_batch, self.chunk, self.window, self.chunked = max_batch, chunk, window, chunked
        self._split_items = split_items
        room = max_batch + split_items
        self.items = torch.empty((1 + room, ITEM_FIELDS), dtype=torch.int32, device=device)
        self.partials = Partials(
            first_item=torch.empty(max_batch + 1, dtype=torch.int32, device=device),
            totals=torch.empty((room, heads, head_dim), dtype=torch.float32, device=device),
            log_sums=torch.empty((room, heads), dtype=torch.float32, device=device),
        )

    def programs(self, batch: int, head_blocks: int) -> int:
        """A grid for this batch: a program for each row, and some that split rows can fill."""
        return batch + min(self._split_items, -(-PROGRAMS // head_blocks))

    def plan(self, lengths: torch.Tensor) -> None:
        """Makes the items of decodes of these lengths [batch] (int32, own query included, at least 1)."""
        batch = lengths.shape[0]
        if batch > self.max_batch:
            raise ValueError(f"a batch of {batch} rows does not fit in items made for {self.max_batch}")
        block_rows = max(16, triton.next_power_of_2(batch))
        _plan[(1,)](
            lengths, self.items, self.partials.first_item, batch, batch + self._split_items,
            WINDOW=self.window or 0, CHUNKED=self.chunked, CHUNK=self.chunk, FIELDS=ITEM_FIELDS, BLOCK_ROWS=block_rows,
            BLOCK_CHUNKS=max(1, PLAN_TILE // block_rows),
            num_warps=4,
        )  # fmt: skip


def prefill_items(query_lens: IntArray, context_lens: IntArray, block_queries: int, first_place: int) -> IntArray:
    """The items of rows that compute several tokens, the first of them at `first_place` of the batch. None is split:
    a block of queries is work enough for a program, and there are many."""
    blocks = query_blocks(query_lens, block_queries, context_lens)
    items = np.full((1 + len(blocks), ITEM_FIELDS), -1, dtype=np.int32)
    items[0, 0] = len(blocks)
    items[1:, :2] = blocks + np.array([first_place, 0], dtype=np.int32)
    return items


@triton.jit(do_not_specialize=["batch", "room"])
def _plan(
    lengths,  # [batch]
    items,  # [1 + room, FIELDS]
    first_item,  # [batch + 1]
    batch: int, room: int,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Splits the rows of at least so many chunks that the items fit, the fewest possible."""
    row = tl.arange(0, BLOCK_ROWS)
    real = row < batch
    length = tl.load(lengths + row, mask=real, other=1)
    first_chunk = tl.zeros([BLOCK_ROWS], tl.int32)
    if WINDOW:
        first_chunk = oldest_seen(length - 1, WINDOW, CHUNKED) // CHUNK
    chunks = tl.where(real, tl.cdiv(length, CHUNK) - first_chunk, 0)
    single = real.to(tl.int32)
    least = 2
    for _ in range(20):  # doublings: beyond any number of chunks, where every row is one item
        if tl.sum(tl.where(chunks >= least, chunks, single)) > room:
            least *= 2
    split = chunks >= least
    count = tl.where(split, chunks, single)
    place = tl.cumsum(count, 0) - count
    tl.store(first_item + row, place, mask=real)
    tl.store(first_item + batch, tl.sum(count))
    tl.store(items, tl.sum(count))

    for start in range(0, tl.max(count), BLOCK_CHUNKS):
        number = start + tl.arange(0, BLOCK_CHUNKS)
        entry = items + (1 + place[:, None] + number[None, :]) * FIELDS
        valid = number[None, :] < count[:, None]
        chunk = tl.where(split[:, None], first_chunk[:, None] + number[None, :], -1)
        tl.store(entry, row[:, None] + number[None, :] * 0, mask=valid)
        tl.store(entry + 1, row[:, None] * 0 + number[None, :] * 0, mask=valid)
        tl.store(entry + 2, chunk, mask=valid)

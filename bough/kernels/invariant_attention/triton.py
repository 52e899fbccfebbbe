"""Invariant attention in Triton: one kernel for decodes and prompts (`device`), shared out among programs so that
nothing of that shows in the result.

Keys are cut at multiples of the *chunk*. A chunk is attended by itself and the chunks' results are merged in order, by
one program or by a second kernel: the arithmetic is the same to the bit. So a few long decodes are split over the
device and many short ones left whole, by a plan made on the device. A list of items begins with their number; an item
is a row's place in the batch, its first query, and the one chunk to attend, or -1 for all. `DecodeItems` belongs to one
window and one stream.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from bough.kernels.decode_attention.work import oldest_seen
from bough.kernels.invariant_attention.device import attend, merge
from bough.kernels.prefill_attention.triton import LOG2_E, IntArray, PrefillConfig, query_blocks
from bough.kernels.shared_memory import LITTLE, PLENTY, shared_bytes

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


MERGE_WIDTH = 256
MIN_DOT = 16  # the smallest matrix that tl.dot takes
DECODE_LINES = 64  # enough for the warp-group instructions; a decode, which uses few of them, still waits for memory
PROMPT_LINES = 64  # may be another number only if `gpu_check_deterministic.py` finds the same bits


@dataclass(frozen=True, slots=True)
class InvariantConfig(PrefillConfig):
    """Depends on the model and the device alone. `chunk` and `block_n` define the result to the bit."""

    chunk: int = 512  # keys attended by themselves; a multiple of block_n


def config_for(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, prompts: bool = False, room: int | None = None
) -> InvariantConfig:
    """For decodes or for prompts. The two have the same chunks and blocks of keys, and compute a line alike. `room` is
    the shared memory of a program, in bytes; this machine's when left out."""
    room = shared_bytes() if room is None else room
    group = heads // kv_heads
    pack = min(group & -group, 16)  # its largest power of two
    if dtype.itemsize > 2:  # no tensor cores: the products are unrolled, and larger tiles would spill
        lines, stages = (16, 1) if head_dim > 256 and room < PLENTY else (32, 2)
        return InvariantConfig(block_m=lines, block_n=16, pack=pack, num_warps=4, num_stages=stages)
    if head_dim > 256:  # latents: two sums as wide as they are stay in registers
        return InvariantConfig(block_m=32, block_n=16 if room <= LITTLE else 32, pack=pack, num_warps=8, num_stages=2)
    if head_dim > 128:
        return InvariantConfig(block_m=64, block_n=32, pack=pack, num_warps=8, num_stages=2)
    lines = PROMPT_LINES if prompts else DECODE_LINES
    stages = 2 if head_dim > 64 and room <= LITTLE else 3  # says when keys are fetched, nothing of the arithmetic
    return InvariantConfig(block_m=lines, block_n=64, pack=pack, num_warps=lines // 16, num_stages=stages)


def invariant_attention(
    q: torch.Tensor,  # [tokens, heads, head_dim], rows back to back, the last dimension contiguous
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim], the tokens' own keys included
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]; of latents the first columns of k_cache
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    query_starts: torch.Tensor,  # [batch + 1] int32
    lengths: torch.Tensor,  # [batch] int32, keys that the row's last query sees
    items: torch.Tensor,  # [1 + items, 3] int32
    *,
    programs: int,  # that share the items, for each block of heads
    partials: Partials,  # for items that are single chunks
    split_rows: int,  # the first so many rows may be split into such items
    page_size: int,
    scale: float,
    window: int | None = None,
    chunked: bool = False,  # the window is one of those that stand side by side
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads] a logit without a value in each softmax
    k_scale: float = 1.0,  # what stored keys and values are multiplied with
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    config: InvariantConfig | None = None,
) -> torch.Tensor:
    """[tokens, heads, head_dim of the values] in q's type, accumulated in float32. Writes the tokens that the items
    name."""
    tokens, heads, head_dim = *q.shape[:2], v_cache.shape[2]
    extra = q.shape[2] - head_dim  # columns of latents that are keys alone
    kv_heads = k_cache.shape[1]
    chosen = config or config_for(heads, kv_heads, head_dim, q.dtype)
    assert chosen.chunk % chosen.block_n == 0
    assert q.stride(2) == 1
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous() if not extra else v_cache.data_ptr() == k_cache.data_ptr()
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    attend[(heads // chosen.pack, programs)](
        q, k_cache, v_cache, page_table, rows, query_starts, lengths, items, sinks, out, partials.totals,
        partials.log_sums, q.stride(0), q.stride(1), page_table.stride(0),
        scale * k_scale * LOG2_E if softcap is None else scale * k_scale / softcap, v_scale,
        0.0 if softcap is None else softcap * LOG2_E,
        HAS_SOFTCAP=softcap is not None, WINDOW=window or 0, CHUNKED=chunked, HEADS=heads, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, EXTRA=extra, PAGE_SIZE=page_size, FIELDS=ITEM_FIELDS, CHUNK=chosen.chunk, PACK=chosen.pack,
        BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_E=max(MIN_DOT, triton.next_power_of_2(extra)),
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if split_rows:
        merge[(triton.cdiv(heads * head_dim, MERGE_WIDTH), split_rows)](
            partials.first_item, query_starts, sinks, partials.totals, partials.log_sums, out, v_scale,
            HEADS=heads, HEAD_DIM=head_dim, BLOCK_E=MERGE_WIDTH,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out

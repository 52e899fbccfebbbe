# mypy: disable-error-code="import-untyped"
"""Invariant attention in Triton: one kernel for decodes and prompts.

This is the host's side; `device` holds the kernels, `work` shares them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from bough.kernels.invariant_attention.device import attend, merge
from bough.kernels.invariant_attention.work import ITEM_FIELDS, Partials
from bough.kernels.shared_memory import LITTLE, PLENTY, shared_bytes

LOG2_E = 1.4426950408889634
MERGE_WIDTH = 256
MIN_DOT = 16  # the smallest matrix that tl.dot takes
DECODE_LINES = 64  # enough for the warp-group instructions; a decode, which uses few of them, still waits for memory
PROMPT_LINES = 64  # may be another number only if `gpu_check_deterministic.py` finds the same bits


@dataclass(frozen=True, slots=True)
class InvariantConfig:
    """Depends on the model and the device alone. `chunk` and `block_n` define the result to the bit."""

    chunk: int  # keys attended by themselves; a multiple of block_n
    block_m: int  # lines of the tile of scores: queries times packed heads
    block_n: int  # keys at a time
    pack: int  # query heads of one kv head that a program takes together; a power of two
    num_warps: int
    num_stages: int

    @property
    def block_queries(self) -> int:
        """Queries of a row that one item covers."""
        return self.block_m // self.pack


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
        return InvariantConfig(chunk=512, block_m=lines, block_n=16, pack=pack, num_warps=4, num_stages=stages)
    if head_dim > 256:  # latents: two sums as wide as they are stay in registers
        return InvariantConfig(
            chunk=512, block_m=32, block_n=16 if room <= LITTLE else 32, pack=pack, num_warps=8, num_stages=2
        )
    if head_dim > 128:
        return InvariantConfig(chunk=512, block_m=64, block_n=32, pack=pack, num_warps=8, num_stages=2)
    lines = PROMPT_LINES if prompts else DECODE_LINES
    stages = 2 if head_dim > 64 and room <= LITTLE else 3  # says when keys are fetched, nothing of the arithmetic
    return InvariantConfig(chunk=512, block_m=lines, block_n=64, pack=pack, num_warps=lines // 16, num_stages=stages)


def invariant_attention(
    q: torch.Tensor,  # [tokens, heads, head_dim], rows back to back, the last dimension contiguous
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim], the tokens' own keys included
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]; of latents the first columns of k_cache
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    query_starts: torch.Tensor,  # [batch + 1] int32
    lengths: torch.Tensor,  # [batch] int32, keys that the row's last query sees
    items: torch.Tensor,  # [1 + items, 3] int32, see `work`
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
        PRECISION="ieee",  # says something of float32 alone; most AMD devices refuse any other
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if split_rows:
        merge[(triton.cdiv(heads * head_dim, MERGE_WIDTH), split_rows)](
            partials.first_item, query_starts, sinks, partials.totals, partials.log_sums, out, v_scale,
            HEADS=heads, HEAD_DIM=head_dim, BLOCK_E=MERGE_WIDTH,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out

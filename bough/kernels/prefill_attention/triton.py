# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""Prefill attention in Triton: tiles of scores that never leave the multiprocessor, after FlashAttention.

This is the host's side: what is tuned, and the launch. `device` holds the kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from bough.kernels.prefill_attention.device import attend
from bough.kernels.shared_memory import LITTLE, PLENTY, shared_bytes

IntArray = npt.NDArray[np.int32]


def query_blocks(query_lens: IntArray, block_m: int, context_lens: IntArray | None = None) -> IntArray:
    """[blocks, 2]: a row's place in the batch and the block's first query in that row; `block_m` queries each.

    The blocks with the most keys to read come first, so that the last to run are short. Context lengths, which may be
    bounds, serve that order only.
    """
    counts = -(-query_lens // block_m)
    place = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    first = (np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    keys = np.minimum(first + block_m, query_lens[place])
    if context_lens is not None:
        keys = keys + context_lens[place]
    order = np.argsort(-keys, kind="stable")
    return np.stack((place, first), axis=1).astype(np.int32)[order]


def ends_of(blocks: IntArray, query_lens: IntArray, block_m: int) -> IntArray:
    """Those of the blocks that hold the last query of their row."""
    return blocks[blocks[:, 1] + block_m >= query_lens[blocks[:, 0]]]


LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """What is tuned; results depend on it only by rounding."""

    block_m: int  # lines of the tile of scores: queries times packed heads
    block_n: int  # keys at a time
    pack: int  # query heads of one kv head that a program takes together; a power of two
    num_warps: int
    num_stages: int
    descriptors: bool = False  # fetch fresh keys and values by the copy engine

    @property
    def block_queries(self) -> int:
        """The `block_m` of `query_blocks`."""
        return self.block_m // self.pack


def config_for(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, room: int | None = None
) -> PrefillConfig:
    """Depends on the model and the device alone: whoever makes the blocks and whoever runs them get the same. `room` is
    the shared memory of a program, in bytes; this machine's when left out."""
    room = shared_bytes() if room is None else room
    group = heads // kv_heads
    pack = min(group & -group, 16)  # its largest power of two
    if dtype.itemsize > 2:  # no tensor cores: the products are unrolled, and larger tiles would spill
        lines, stages = (16, 1) if head_dim > 256 and room < PLENTY else (32, 2)
        return PrefillConfig(block_m=lines, block_n=16, pack=pack, num_warps=8, num_stages=stages)
    if head_dim > 256:
        return PrefillConfig(block_m=32, block_n=16 if room < PLENTY else 32, pack=pack, num_warps=8, num_stages=2)
    if head_dim > 128 and room < PLENTY:
        return PrefillConfig(block_m=64, block_n=32, pack=pack, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillConfig(block_m=128, block_n=64, pack=pack, num_warps=8, num_stages=2)
    stages = 2 if head_dim > 64 and room <= LITTLE else 3
    return PrefillConfig(block_m=128, block_n=64, pack=pack, num_warps=8, num_stages=stages, descriptors=True)


def prefill_attention(
    q: torch.Tensor,  # [tokens, heads, head_dim], rows back to back, the last dimension contiguous
    k: torch.Tensor,  # [tokens, kv_heads, head_dim], of the same tokens, each token's heads adjacent
    v: torch.Tensor,  # [tokens, kv_heads, head_dim]
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    page_table: torch.Tensor,  # [max_rows, max_pages] int32
    rows: torch.Tensor,  # [batch] int32, lines of page_table
    query_starts: torch.Tensor,  # [batch + 1] int32
    context_lens: torch.Tensor,  # [batch] int32, tokens of the row in the cache
    blocks: torch.Tensor,  # [blocks, 2] int32, of `query_blocks` with the config's block_queries; negative: none
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    chunked: bool = False,  # the window is one of those that stand side by side
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [heads] a logit without a value in each softmax
    k_scale: float = 1.0,  # what stored keys and values are multiplied with
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """[tokens, heads, head_dim] in q's type, accumulated in float32."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    chosen = config or config_for(heads, kv_heads, head_dim, q.dtype)
    assert q.stride(2) == 1
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    block_d = triton.next_power_of_2(head_dim)
    # A descriptor's tile is a power of two wide: of other heads it would fetch the neighbour's too.
    descriptors = chosen.descriptors and block_d == head_dim and _has_descriptors(q.device)
    unit = LOG2_E if softcap is None else 1 / softcap
    attend[(heads // chosen.pack, blocks.shape[0])](
        q, k, v, _describe(k, chosen.block_n) if descriptors else k, _describe(v, chosen.block_n) if descriptors else v,
        k_cache, v_cache, page_table, rows, query_starts, context_lens, blocks, sinks, out, q.stride(0),
        q.stride(1), k.stride(0), v.stride(0), page_table.stride(0), scale * unit, scale * k_scale * unit, v_scale,
        0.0 if softcap is None else softcap * LOG2_E,
        HAS_SOFTCAP=softcap is not None, WINDOW=window or 0, CHUNKED=chunked, HEADS=heads, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, DESCRIPTORS=descriptors, PACK=chosen.pack, BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n, BLOCK_D=block_d,
        PRECISION="ieee",  # says something of float32 alone; any other is refused for most AMD devices
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip
    return out


@functools.cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether a copy engine fetches tiles: NVIDIA's devices have one since Hopper. Triton's interpreter acts as if."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _describe(fresh: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Fresh keys or values as a matrix of tokens by heads times head_dim, fetched a head at a time."""
    tokens, kv_heads, head_dim = fresh.shape
    return TensorDescriptor(fresh, [tokens, kv_heads * head_dim], [fresh.stride(0), 1], [block_n, head_dim])

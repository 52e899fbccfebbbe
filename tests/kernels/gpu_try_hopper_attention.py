"""Prefill attention over fresh keys in Gluon, beside ours in Triton: `PYTHONPATH=. python
tests/kernels/gpu_try_hopper_attention.py`.

Triton waits for the scores of a block before it takes their softmax, so the tensor cores stand still meanwhile. Here
the next block's scores and the last one's values are multiplied while the softmax is taken. Prints the error against
float64 and times for several cuts. Not part of the engine: it serves to decide whether it should be.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import partial

import numpy as np
import torch
import triton
from gpu_bench_prefill_attention import SCALE, Bench
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bough.kernels.prefill_attention.blocks import query_blocks
from bough.kernels.prefill_attention.triton import config_for

LOG2_E = 1.4426950408889634
CUTS = [
    (128, 64, 2, 8),
    (128, 64, 3, 8),
    (128, 128, 2, 8),
    (64, 64, 2, 4),
    (64, 64, 3, 4),
    (64, 128, 2, 4),
]  # m, n, stages, warps


@gluon.jit
def attend_fresh(
    q,
    k,
    v,
    k_desc,
    v_desc,
    query_starts,
    blocks,
    out,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    v_token_stride,
    scale,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PACK: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A block of queries for PACK heads, over fresh keys alone."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    FOLDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, FOLDED, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    Q_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], gl.bfloat16)
    first_head = gl.program_id(0) * PACK
    block = gl.program_id(1)
    kv_head = first_head // (HEADS // KV_HEADS)
    place = gl.load(blocks + block * 2)
    if place < 0:
        return
    first = gl.load(blocks + block * 2 + 1)
    row_start = gl.load(query_starts + place)
    queries = gl.load(query_starts + place + 1) - row_start
    column = kv_head * HEAD_DIM

    line = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, FLAT))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, FLAT))
    query = first + line // PACK
    token = row_start.to(gl.int64) + query
    head = first_head + line % PACK
    wanted = (query < queries)[:, None]
    tile = gl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=wanted, other=0.0
    )
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, HEAD_DIM], Q_SMEM, tile)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], v_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
    fence_async_shared()

    whole = (first + 1) // BLOCK_N  # blocks of keys that every query sees
    for i in gl.static_range(STAGES):
        mbarrier.expect(k_ready.index(i), k_desc.block_type.nbytes, pred=i < whole)
        tma.async_copy_global_to_shared(
            k_desc, [row_start + i * BLOCK_N, column], k_ready.index(i), k_smem.index(i), pred=i < whole
        )
        mbarrier.expect(v_ready.index(i), v_desc.block_type.nbytes, pred=i < whole)
        tma.async_copy_global_to_shared(
            v_desc, [row_start + i * BLOCK_N, column], v_ready.index(i), v_smem.index(i), pred=i < whole
        )

    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S)
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    norm = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, S))
    acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, layout=FOLDED)
    if whole > 0:
        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.expect(k_ready.index(0), k_desc.block_type.nbytes, pred=whole > STAGES)
        tma.async_copy_global_to_shared(
            k_desc, [row_start + STAGES * BLOCK_N, column], k_ready.index(0), k_smem.index(0), pred=whole > STAGES
        )
        top = gl.max(scores, 1) * scale
        weights = gl.exp2(scores * scale - top[:, None])
        norm = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(gl.bfloat16), P)
        for j in range(whole - 1):
            k_at = (j + 1) % STAGES
            mbarrier.wait(k_ready.index(k_at), ((j + 1) // STAGES) & 1)
            ahead = warpgroup_mma(q_smem, k_smem.index(k_at).permute((1, 0)), nothing, use_acc=False, is_async=True)
            v_at = j % STAGES
            mbarrier.wait(v_ready.index(v_at), (j // STAGES) & 1)
            folded = warpgroup_mma(p, v_smem.index(v_at), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(ahead,))
            new_top = gl.maximum(top, gl.max(scores, 1) * scale)
            shrink = gl.exp2(top - new_top)
            weights = gl.exp2(scores * scale - new_top[:, None])
            norm = norm * shrink + gl.sum(weights, 1)
            top = new_top
            acc = warpgroup_mma_wait(0, deps=(folded,))
            more = j + 1 + STAGES
            mbarrier.expect(k_ready.index(k_at), k_desc.block_type.nbytes, pred=more < whole)
            tma.async_copy_global_to_shared(
                k_desc, [row_start + more * BLOCK_N, column], k_ready.index(k_at), k_smem.index(k_at), pred=more < whole
            )
            mbarrier.expect(v_ready.index(v_at), v_desc.block_type.nbytes, pred=more - 1 < whole)
            tma.async_copy_global_to_shared(
                v_desc,
                [row_start + (more - 1) * BLOCK_N, column],
                v_ready.index(v_at),
                v_smem.index(v_at),
                pred=more - 1 < whole,
            )
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, FOLDED))[:, None]
            p = gl.convert_layout(weights.to(gl.bfloat16), P)
        mbarrier.wait(v_ready.index((whole - 1) % STAGES), ((whole - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index((whole - 1) % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))

    # The diagonal: what is not the row's is never read.
    end = gl.minimum(first + BLOCK_M // PACK, queries)
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, FLAT))
    s_query = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, S)) // PACK
    s_key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
    for start in range(whole * BLOCK_N, end, BLOCK_N):
        held = (start + key < queries)[:, None]
        at = (row_start.to(gl.int64) + start + key)[:, None]
        k_tile = gl.load(k + at * k_token_stride + column + d[None, :], mask=held, other=0.0)
        v_tile = gl.load(v + at * v_token_stride + column + d[None, :], mask=held, other=0.0)
        k_smem.index(0).store(k_tile)
        v_smem.index(0).store(v_tile)
        fence_async_shared()
        scores = warpgroup_mma(q_smem, k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        visible = s_query[:, None] >= (start + s_key)[None, :]
        scores = gl.where(visible, scores, -1e30)
        new_top = gl.maximum(top, gl.max(scores, 1) * scale)
        shrink = gl.exp2(top - new_top)
        weights = gl.where(visible, gl.exp2(scores * scale - new_top[:, None]), 0.0)
        norm = norm * shrink + gl.sum(weights, 1)
        top = new_top
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, FOLDED))[:, None]
        acc = warpgroup_mma(gl.convert_layout(weights.to(gl.bfloat16), P), v_smem.index(0), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(k_ready.index(i))
        mbarrier.invalidate(v_ready.index(i))
    result = acc / gl.convert_layout(norm, gl.SliceLayout(1, FOLDED))[:, None]
    flat = gl.convert_layout(result.to(gl.bfloat16), FLAT)
    gl.store(out + (token * HEADS + head)[:, None] * HEAD_DIM + d[None, :], flat, mask=wanted)


def launch(case: Bench, pack: int, cut: tuple[int, int, int, int]) -> None:
    block_m, block_n, stages, warps = cut
    q, k, v = case.q, case.k, case.v
    tokens, kv_heads, head_dim = k.shape
    layout = gl.NVMMASharedLayout.get_default_for([block_n, head_dim], gl.bfloat16)
    described = [
        TensorDescriptor(x, [tokens, kv_heads * head_dim], [x.stride(0), 1], [block_n, head_dim], layout)
        for x in (k, v)
    ]
    blocks = torch.from_numpy(query_blocks(case.query_lens, block_m // pack, case.context_lens)).cuda()
    attend_fresh[(q.shape[1] // pack, blocks.shape[0])](
        q,
        k,
        v,
        *described,
        case.on_device[0],
        blocks,
        case.out,
        *q.stride()[:2],
        k.stride(0),
        v.stride(0),
        SCALE * LOG2_E,
        HEADS=q.shape[1],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PACK=pack,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=stages,
        WARPS=warps,
        num_warps=warps,
    )


def main() -> None:
    torch.manual_seed(0)
    lengths = {"2 x 4096": np.full(2, 4096), "ragged": np.array([100, 700, 33, 1024, 2048, 1, 511, 900])}
    for heads in (32, 16):
        for name, lens in lengths.items():
            case = Bench(heads, lens, np.zeros(len(lens), int))
            ours = case.time_us(config_for(heads, 8, 128, torch.bfloat16))
            print(f"{heads} heads, {name}: ours {ours:.0f} us, {case.flops / ours / 1e6:.0f} TFLOP/s")
            for cut in CUTS:
                case.out.zero_()
                launch(case, heads // 8, cut)
                error = case.error()
                time = 1e3 * triton.testing.do_bench(
                    partial(launch, case, heads // 8, cut), return_mode="median", warmup=10, rep=50
                )
                print(f"  {cut}: {time:.0f} us, {case.flops / time / 1e6:.0f} TFLOP/s, error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()

"""What adapters add, in Triton: two launches, down to the rank and up again.

A program takes a block of rows of one slot, so that neighbours which share an adapter read it once, and programs
without a block return at once: how many there are depends on sizes alone, as a CUDA graph needs it. The inputs are cut
among programs as well, whose parts are summed on the way up, in a fixed order.
"""

import torch
import triton
import triton.language as tl

from bough.kernels.lora.reference import FEW_ROWS, TILE, AdapterStack, GroupedRows
from bough.kernels.overlap import overlap, take_turn, take_turn_first

MOST_INPUTS = 8192  # that small steps cut into short pieces: on the way up each program reads all of its rows' parts
MOST_RANK = 64  # lines of thin matrices that one program computes


def lora_(product: torch.Tensor, x: torch.Tensor, stack: AdapterStack, grouped: GroupedRows) -> None:
    """Adds to `product` [rows, outputs] what the adapters of the rows make of x [rows, inputs]."""
    rows, blocks, count = len(x), len(grouped.blocks), len(grouped.order)
    matrices, rank, inputs = stack.down.shape[1:]
    if not rank:  # no adapter has ever changed this layer
        return
    lines = min(triton.next_power_of_2(rank if stack.step else matrices * rank), MOST_RANK)  # which read the same
    few, wide = grouped.block_rows == FEW_ROWS, x.dtype == torch.float32
    splits = triton.cdiv(inputs, 512 if few and inputs <= MOST_INPUTS else 1024)
    thin = torch.empty((splits, count, matrices * rank), dtype=torch.float32, device=x.device)
    cut = {"BLOCK_M": grouped.block_rows, "MATRICES": matrices, "RANK": rank, "SPLITS": splits}
    cut |= {"PRECISION": "ieee" if wide else "tf32", "num_stages": 2 if wide else 3, **overlap(0 if few else rows)}
    cut["EXPERTS"], block_k = stack.experts, 256 if few and not wide else 64
    places = (grouped.order, grouped.blocks, stack.ranks, *stack.ranks.stride())
    _down[(blocks, triton.cdiv(matrices * rank, lines), splits)](
        x, stack.down, thin, *places, x.stride(0), stack.step, *stack.down.stride(), count,
        K=inputs, BLOCK_K=block_k, BLOCK_R=lines, num_warps=4, **cut,
    )  # fmt: skip
    # A small step has few blocks, so more programs share the outputs of one; of large ranks less fits at a time.
    share, block_n = TILE // 4 if few else TILE, max(16, min(128 if few else 64, (2048 if wide else 8192) // rank))
    _up[(blocks, len(stack.tiles), TILE // share)](
        thin, stack.up, product, *places, stack.tiles, product.stride(0), *stack.up.stride(), count,
        SHARE=share, BLOCK_N=block_n, num_warps=4, **cut,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _down(
    x, down, thin, order, blocks, ranks, ranks_stride, ranks_step, x_stride, x_step, slot_stride, matrix_stride,
    rank_stride, k_stride, rows, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    MATRICES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The rows of a block times some lines of the thin matrices, over some of the inputs."""
    take_turn_first(OVERLAP)
    block = blocks + 3 * tl.program_id(0)
    slot = tl.load(block).to(tl.int64) - 1
    if slot < 0:
        return
    line = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    within = line < MATRICES * RANK
    own_ranks = ranks + slot // EXPERTS * ranks_stride
    rank = tl.load(own_ranks + line // RANK * ranks_step, mask=within, other=0)
    there = line % RANK < rank
    if tl.max(there.to(tl.int32), axis=0) == 0:
        return
    first = tl.load(block + 1)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    held = m < tl.load(block + 2)
    row = tl.load(order + first + m, mask=held, other=0).to(tl.int64)
    split = tl.program_id(2)
    each: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    lines = down + slot * slot_stride + line // RANK * matrix_stride + line % RANK * rank_stride
    x += tl.program_id(1) * BLOCK_R // RANK * x_step
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for start in range(split * each, min(K, (split + 1) * each), BLOCK_K):
        inside = start + k < K
        left = tl.load(
            x + row[:, None] * x_stride + start + k[None, :], mask=held[:, None] & inside[None, :], other=0.0
        )
        columns = lines[None, :] + (start + k[:, None]) * k_stride
        right = tl.load(columns, mask=inside[:, None] & there[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    at = (split * rows + first + m).to(tl.int64)
    tl.store(thin + at[:, None] * (MATRICES * RANK) + line[None, :], total, mask=held[:, None] & within[None, :])


@triton.jit(do_not_specialize=["rows"])
def _up(
    thin, up, product, order, blocks, ranks, ranks_stride, ranks_step, tiles, product_stride, slot_stride, line_stride,
    rank_stride, rows, SHARE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, MATRICES: tl.constexpr,
    RANK: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The sum over the inputs' parts, times the outputs of a tile, or of a share of it; added to the product. What does
    not depend on the sum is read before the kernel's turn: the way down begins when the product is whole."""
    block, tile = blocks + 3 * tl.program_id(0), tiles + 4 * tl.program_id(1)
    slot, matrix = tl.load(block).to(tl.int64) - 1, tl.load(tile)
    rank = 0
    if slot >= 0:
        rank = tl.load(ranks + slot // EXPERTS * ranks_stride + matrix * ranks_step)
    if rank == 0:
        take_turn(OVERLAP)
        return
    first, begin, end = tl.load(block + 1), tl.load(tile + 1) + tl.program_id(2) * SHARE, tl.load(tile + 2)
    end = min(end, begin + SHARE)
    m, line, n = tl.arange(0, BLOCK_M), tl.arange(0, RANK), begin + tl.arange(0, BLOCK_N)
    held, there = m < tl.load(block + 2), line < rank
    row = tl.load(order + first + m, mask=held, other=0).to(tl.int64)
    out = product + row[:, None] * product_stride + n[None, :]
    up_line = tl.load(tile + 3) - tl.load(tile + 1) + n
    columns = up + slot * slot_stride + up_line[None, :] * line_stride + line[:, None] * rank_stride
    right = tl.load(columns, mask=there[:, None] & (n < end)[None, :], other=0.0)
    before = tl.load(out, mask=held[:, None] & (n < end)[None, :], other=0.0)
    take_turn(OVERLAP)
    left = tl.zeros((BLOCK_M, RANK), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * rows + first + m).to(tl.int64)
        places = thin + at[:, None] * (MATRICES * RANK) + matrix * RANK + line[None, :]
        left += tl.load(places, mask=held[:, None] & there[None, :], other=0.0)
    narrow = left.to(up.dtype.element_ty)
    for _ in range(begin, end, BLOCK_N):
        total = tl.dot(narrow, right, input_precision=PRECISION) + before.to(tl.float32)
        tl.store(out, total.to(product.dtype.element_ty), mask=held[:, None] & (n < end)[None, :])
        n, out, columns = n + BLOCK_N, out + BLOCK_N, columns + BLOCK_N * line_stride
        right = tl.load(columns, mask=there[:, None] & (n < end)[None, :], other=0.0)
        before = tl.load(out, mask=held[:, None] & (n < end)[None, :], other=0.0)

"""The device code of the skinny products: one kernel by rows, which may have a norm before it and a gate behind, and
one by tiles.

A tensor that a product does not have is given as None, and the code for it is then not compiled.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from bough.kernels.activation.triton import gated
from bough.kernels.overlap import take_turn


@triton.jit
def product_by_rows(
    x, residual, norm_weight, weight, scales, up_weight, bias, out, stream, x_stride, residual_stride, out_stride, eps,
    N,
    M: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, PLUS_ONE: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Weight rows whole and in registers, used by each row of `x` in turn.

    They are held as [rows, pieces, inputs of a piece]. Triton deals out the warps along the last side first and along
    the first side next: where a piece is what one warp reads at once, each warp has rows of its own, and sums them
    without waiting for the others.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    inside = (n < N)[:, None, None] & (k < K)[None, :, :]
    offsets = n.to(tl.int64)[:, None, None] * K + k[None, :, :]
    w = tl.load(weight + offsets, mask=inside, other=0.0, eviction_policy="evict_first")
    if up_weight is not None:
        u = tl.load(up_weight + offsets, mask=inside, other=0.0, eviction_policy="evict_first")
    take_turn(OVERLAP)  # the weights, most of the work, are already on their way
    for m in tl.static_range(M):
        row = tl.load(x + m * x_stride + k, mask=k < K, other=0.0)
        if norm_weight is not None:
            if residual is not None:
                held = tl.load(residual + m * residual_stride + k, mask=k < K, other=0.0)
                row = (row.to(tl.float32) + held.to(tl.float32)).to(row.dtype)
                tl.store(stream + m * K + k, row, mask=(k < K) & (tl.program_id(0) == 0))
            scale = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
            if PLUS_ONE:
                scale += 1.0
            wide = row.to(tl.float32)
            row = (wide * tl.rsqrt(tl.sum(wide * wide) / K + eps) * scale).to(row.dtype)
        y = sums_of_rows(w, row, scales, n, n < N, GROUPS)
        if bias is not None:
            y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        y = y.to(row.dtype)
        if up_weight is not None:
            y = gated(y, sums_of_rows(u, row, None, n, n < N, GROUPS).to(row.dtype), ACTIVATION)
        tl.store(out + m * out_stride + n, y, mask=n < N)


@triton.jit
def sums_of_rows(w, row, scales, n, there, GROUPS: tl.constexpr):
    """The products of weight rows `n` [rows, pieces, piece] with a row [pieces, piece] of `x`. The weight may have a
    scale for each row, or for each piece."""
    products = widened(w) * row.to(tl.float32)[None, :, :]
    if scales is not None and GROUPS > 1:
        piece = tl.arange(0, w.shape[1])[None, :]
        held = tl.load(scales + n[:, None] * GROUPS + piece, mask=there[:, None] & (piece < GROUPS), other=0.0)
        products *= held[:, :, None]
    y = tl.sum(tl.sum(products, axis=1), axis=1)
    if scales is not None and GROUPS == 1:
        y *= tl.load(scales + n, mask=there, other=0.0)
    return y


@triton.jit
def widened(w):
    """Numbers as float32. Conversions of bytes are slow; as the last byte of 2^23, an integer needs only be moved."""
    if w.dtype == tl.int8 and cuda_capability_geq(8, 0):
        moved = tl.inline_asm_elementwise(
            "{ .reg .b32 bytes; xor.b32 bytes, $4, 0x80808080; prmt.b32 $0, bytes, 0x4B000000, 0x7440; "
            "prmt.b32 $1, bytes, 0x4B000000, 0x7441; prmt.b32 $2, bytes, 0x4B000000, 0x7442; "
            "prmt.b32 $3, bytes, 0x4B000000, 0x7443; }",
            "=r,=r,=r,=r,r", [w], dtype=tl.uint32, is_pure=True, pack=4,
        )  # fmt: skip
        return moved.to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
    return w.to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def product_by_tiles(
    x, weight, scales, bias, out, partials, arrivals, x_stride, out_stride, M, N,
    K: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tiles of the weight on tensor cores, `x` padded to their smallest side."""
    take_turn(OVERLAP)
    tile, split = tl.program_id(0), tl.program_id(1)
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = n.to(tl.int64)[:, None] * K
    share: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, share, BLOCK_K):
        k = split * share + start + tl.arange(0, BLOCK_K)
        here = (m < M)[:, None] & (k < K)[None, :]
        rows = tl.load(x + m[:, None] * x_stride + k[None, :], mask=here, other=0.0)
        inside = (n < N)[:, None] & (k < K)[None, :]
        w = tl.load(weight + weight_rows + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        if scales is not None:
            group = 0 if GROUPS == 1 else (split * share + start) // 128  # a tile has inputs of one group only
            scale = tl.load(scales + n * GROUPS + group, mask=(n < N) & (group < GROUPS), other=0.0)
            acc += tl.dot(rows, w.to(rows.dtype).T, input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(rows, w.T, acc, input_precision="ieee")

    target = out + m[:, None] * out_stride + n[None, :]
    written = (m < M)[:, None] & (n < N)[None, :]
    if SPLIT_K > 1:
        part = tl.num_programs(0) * BLOCK_M * BLOCK_N
        own = partials + (tile * BLOCK_M + m[:, None]) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(own + split * part, acc, mask=written)
        tl.debug_barrier()  # all threads of the program have written before one of them says so
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            # The last to arrive sums all parts in their order: the result does not depend on who was last.
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for other in tl.static_range(SPLIT_K):
                total += tl.load(own + other * part, mask=written, other=0.0, cache_modifier=".cg")
            tl.store(target, _with_bias(total, bias, n, N).to(out.dtype.element_ty), mask=written)
            tl.store(arrivals + tile, 0)  # as the next product finds it
    else:
        tl.store(target, _with_bias(acc, bias, n, N).to(out.dtype.element_ty), mask=written)


@triton.jit
def _with_bias(acc, bias, n, N):
    """The sums of outputs `n` plus the bias, if there is one."""
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return acc

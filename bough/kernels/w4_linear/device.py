"""The device code of products with 4-bit weights: by rows for a single row of `x`, by tiles for some, and dequantising
for many.

Blocks have 128 inputs: 16 words of 8 nibbles (see `reference`). A nibble becomes a float without a conversion: moved to
bits 12 or 16 of the fraction of 2**23, it is 2048 or 128 more than the integer, times a power of two. Inputs are
divided by that power, and what the surplus adds is taken off in the end. `magic`, the bits of 2**23, is an argument
because the compiler then has it in a register, and sets a nibble in with one instruction.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from bough.kernels.activation.triton import gated
from bough.kernels.overlap import take_turn


@triton.jit
def _surplus_codes(words, magic, PLANE: tl.constexpr):
    """The integers in a nibble plus `_surplus`, over `_shrink`."""
    if PLANE == 0:
        moved = words << 16
    elif PLANE <= 2:
        moved = words << 8
    elif PLANE <= 4:
        moved = words
    elif PLANE <= 6:
        moved = words >> 8
    else:
        moved = words >> 16
    return ((moved & (0xF000 if PLANE % 2 else 0xF0000)) | magic).to(tl.float32, bitcast=True)


@triton.jit
def _shrink(PLANE: tl.constexpr):
    return 1.0 / 4096 if PLANE % 2 else 1.0 / 65536


@triton.jit
def _surplus(PLANE: tl.constexpr):
    return 2048.0 if PLANE % 2 else 128.0


@triton.jit
def _stream(x, residual, k, K):
    """Inputs `k` of x + residual."""
    value = tl.load(x + k, mask=k < K, other=0.0)
    if residual is not None:
        held = tl.load(residual + k, mask=k < K, other=0.0)
        value = (value.to(tl.float32) + held.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _inverse_rms(x, residual, stream, eps, K: tl.constexpr, WIDTH: tl.constexpr):
    """Of the row x + residual, which the first program writes down."""
    squares = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in tl.static_range(0, K, WIDTH):
        k = start + tl.arange(0, WIDTH)
        value = _stream(x, residual, k, K)
        if residual is not None:
            tl.store(stream + k, value, mask=(k < K) & (tl.program_id(0) == 0))
        squares += value.to(tl.float32) * value.to(tl.float32)
    return tl.rsqrt(tl.sum(squares) / K + eps)


@triton.jit
def w4_by_rows(
    x, residual, norm_weight, words, scales, zeros, bias, out, stream, magic, eps, N,
    K: tl.constexpr, GROUP: tl.constexpr, PLUS_ONE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A single row of `x`, which may be normed first, with whole rows of the weight. A thread has the same words of
    every row, so that what it reads of `x` serves them all; blocks are summed before they are scaled. With an
    activation, rows of the weight's first half gate those of its second, and a program has some of both in turns."""
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1  # groups of a block
    STEPS: tl.constexpr = 8 // PARTS
    COUNT: tl.constexpr = (K + 127) // 128
    GATED: tl.constexpr = ACTIVATION != ""
    if GATED:
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N) // 2
        there, weight_row = n < N // 2, n + tl.arange(0, BLOCK_N) % 2 * (N // 2)
    else:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        there, weight_row = n < N, n
    rows = weight_row.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCKS), dtype=tl.float32)
    inverse = tl.full((), 1.0, dtype=tl.float32)
    for start in tl.static_range(0, COUNT, BLOCKS):
        word = start * 16 + tl.arange(0, BLOCKS * 16)
        inside = there[:, None] & (word < COUNT * 16)[None, :]
        places = words + rows * (COUNT * 16) + word[None, :]
        packed = tl.load(places, mask=inside, other=0, eviction_policy="evict_first")
        if start == 0:
            take_turn(OVERLAP)  # the weight, most of the work, is already on its way
            if norm_weight is not None:
                inverse = _inverse_rms(x, residual, stream, eps, K, BLOCKS * 128)
        for part in tl.static_range(PARTS):
            dots = tl.zeros((BLOCK_N, BLOCKS * 16), dtype=tl.float32)
            total = tl.zeros((BLOCKS * 16,), dtype=tl.float32)
            surplus = tl.zeros((BLOCKS * 16,), dtype=tl.float32)
            for step in tl.static_range(STEPS):
                k = word // 16 * 128 + (part * STEPS + step) * 16 + word % 16
                given = _stream(x, residual, k, K)
                value = given.to(tl.float32)
                if norm_weight is not None:
                    gain = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
                    if PLUS_ONE:
                        gain += 1.0
                    value = (value * inverse * gain).to(given.dtype).to(tl.float32)
                shrunk = value * _shrink(part * STEPS + step)
                dots += _surplus_codes(packed, magic, part * STEPS + step) * shrunk[None, :]
                total += value
                surplus += value * _surplus(part * STEPS + step)
            group = ((start + tl.arange(0, BLOCKS)) * 128 + part * STEPS * 16) // GROUP
            held = there[:, None] & (group < K // GROUP)[None, :]
            zero = tl.load(zeros + rows * (K // GROUP) + group[None, :], mask=held, other=0).to(tl.float32)
            scale = tl.load(scales + rows * (K // GROUP) + group[None, :], mask=held, other=0.0).to(tl.float32)
            sums = tl.sum(tl.reshape(dots - surplus[None, :], (BLOCK_N, BLOCKS, 16)), axis=2)
            acc += (sums - zero * tl.sum(tl.reshape(total, (BLOCKS, 16)), axis=1)[None, :]) * scale
    y = tl.sum(acc, axis=1)
    if GATED:
        gate, up = tl.split(tl.reshape(y.to(out.dtype.element_ty), (BLOCK_N // 2, 2)))
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out + n, gated(gate, up, ACTIVATION), mask=n < N // 2)
    else:
        if bias is not None:
            y += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
        tl.store(out + n, y.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["M"])
def w4_by_tiles(
    x, words, scales, zeros, bias, out, magic, x_stride, out_stride, M, N,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some rows of `x`: integers less their zero points are exact in 16 bits, and go to the tensor cores."""
    take_turn(OVERLAP)
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    STEPS: tl.constexpr = 8 // PARTS
    WORDS: tl.constexpr = (K + 128 - 1) // 128 * 16
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, 16)
    x_rows = x + m.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(WORDS // 16):
        place = n.to(tl.int64)[:, None] * WORDS + block * 16 + lane[None, :]
        packed = tl.load(words + place, mask=(n < N)[:, None], other=0)
        for part in tl.static_range(PARTS):
            group = (block * 128 + part * STEPS * 16) // GROUP
            held = (n < N) & (group < K // GROUP)
            zero = tl.load(zeros + n * (K // GROUP) + group, mask=held, other=0).to(tl.float32)
            scale = tl.load(scales + n * (K // GROUP) + group, mask=held, other=0.0).to(tl.float32)
            dots = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for step in tl.static_range(STEPS):
                k = block * 128 + (part * STEPS + step) * 16 + lane
                value = tl.load(x_rows + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
                codes = _surplus_codes(packed, magic, part * STEPS + step) * _shrink(part * STEPS + step)
                codes -= zero[:, None] + _surplus(part * STEPS + step)
                dots = tl.dot(value, codes.to(value.dtype).T, dots, input_precision="ieee")
            acc += dots * scale[None, :]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def w4_values(
    words, scales, zeros, out, magic, N,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The weight itself, a block of inputs for each program."""
    WORDS: tl.constexpr = (K + 128 - 1) // 128 * 16
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, inside = n.to(tl.int64)[:, None], (n < N)[:, None]
    lane = tl.arange(0, 16)
    first = tl.program_id(1) * 128
    packed = tl.load(words + rows * WORDS + tl.program_id(1) * 16 + lane[None, :], mask=inside, other=0)
    for plane in tl.static_range(8):
        k = first + plane * 16 + lane
        held = inside & (k < K)[None, :]
        place = rows * (K // GROUP) + (k // GROUP)[None, :]
        zero = tl.load(zeros + place, mask=held, other=0).to(tl.float32)
        scale = tl.load(scales + place, mask=held, other=0.0).to(tl.float32)
        codes = _surplus_codes(packed, magic, plane) * _shrink(plane) - (zero + _surplus(plane))
        tl.store(out + rows * K + k[None, :], (codes * scale).to(out.dtype.element_ty), mask=held)


@triton.jit
def w4_tile(
    words, scales, zeros, first, start, inside,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The values of rows from `first` on and of a block of inputs, that from `start` on. [BLOCK, 128] float32"""
    rows, lane, plane = (first + tl.arange(0, BLOCK)).to(tl.int64)[:, None], tl.arange(0, 16), tl.arange(0, 8)
    WORDS: tl.constexpr = (K + 128 - 1) // 128 * 16
    packed = tl.load(words + rows * WORDS + start // 8 + lane[None, :], mask=inside[:, None], other=0)
    group = (start + plane[None, :] * 16) // GROUP
    held, place = inside[:, None] & (group < K // GROUP), rows * (K // GROUP) + group
    zero = tl.load(zeros + place, mask=held, other=0).to(tl.float32)
    scale = tl.load(scales + place, mask=held, other=0.0).to(tl.float32)
    codes = ((packed[:, None, :] >> (plane * 4)[None, :, None]) & 15).to(tl.float32)
    return tl.reshape((codes - zero[:, :, None]) * scale[:, :, None], (BLOCK, 128))

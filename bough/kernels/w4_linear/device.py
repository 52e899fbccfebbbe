"""The device code of products with 4-bit weights: by rows for a single row of `x`, by tiles for some, and dequantising
for many.

Blocks have 128 inputs: 64 bytes (see `reference`), or 16 words. By rows, the inputs become 16-bit integers with a scale
for each block, kept as two planes of bytes: one instruction then multiplies four nibbles with four bytes. By tiles, a
nibble set into the fraction of a 16-bit number is a number 128 or 1024 above the integer, which is exact.
"""

import triton
import triton.language as tl

from bough.kernels.activation.triton import gated
from bough.kernels.overlap import take_turn


@triton.jit
def fixed_row(
    x, residual, norm_weight, high, low, scales, sums, stream, eps,
    K: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some blocks of one row as 16-bit integers: their bytes `high` and `low`, four inputs in a word, the blocks'
    scales, and sums over 32 inputs. The row may be normed first: then a program reads all of it."""
    take_turn(OVERLAP)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None, None]
    word, byte = tl.arange(0, 32)[None, :, None], tl.arange(0, 4)[None, None, :]
    k = block * 128 + word * 4 + byte
    given = _stream(x, residual, k, K)
    value = given.to(tl.float32)
    if residual is not None:
        tl.store(stream + k, given, mask=k < K)
    if norm_weight is not None:
        whole = tl.arange(0, WIDTH)
        row = _stream(x, residual, whole, K).to(tl.float32)
        gain = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        if PLUS_ONE:
            gain += 1.0
        value = (value * tl.rsqrt(tl.sum(row * row) / K + eps) * gain).to(given.dtype).to(tl.float32)
    scale = tl.max(tl.max(tl.abs(value), axis=2), axis=1) / 32639.0  # 127 * 256 + 127
    whole_value = tl.floor(value / tl.where(scale > 0.0, scale, 1.0)[:, None, None] + 0.5).to(tl.int32)
    upper = (whole_value + 128) >> 8
    lower = whole_value - (upper << 8)
    place, there = (block * 32 + word), block * 128 < K
    tl.store(high + place, tl.sum((upper & 255) << byte * 8, axis=2, keep_dims=True), mask=there)
    tl.store(low + place, tl.sum((lower & 255) << byte * 8, axis=2, keep_dims=True), mask=there)
    span = tl.program_id(0) * BLOCKS * 4 + tl.arange(0, BLOCKS * 4)
    totals = tl.sum(tl.sum(tl.reshape(whole_value, (BLOCKS * 4, 8, 4)), axis=2), axis=1)
    tl.store(sums + span, totals.to(tl.float32), mask=span * 32 < (K + 127) // 128 * 128)
    own = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(scales + own, scale, mask=own * 128 < K)


@triton.jit
def _stream(x, residual, k, K):
    """Inputs `k` of x + residual."""
    value = tl.load(x + k, mask=k < K, other=0.0)
    if residual is not None:
        held = tl.load(residual + k, mask=k < K, other=0.0)
        value = (value.to(tl.float32) + held.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _dot4(nibbles, bytes4, total, FOUR_AT_ONCE: tl.constexpr):
    """`total` plus the products of four small numbers with four signed bytes."""
    if FOUR_AT_ONCE:
        total = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [nibbles, bytes4, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            total += ((nibbles >> byte * 8) & 15) * (bytes4 << (24 - byte * 8) >> 24)
    return total


@triton.jit
def _dots(nibbles, high, low, total, FOUR_AT_ONCE: tl.constexpr):
    """The same with four 16-bit integers."""
    upper = _dot4(nibbles, high, tl.zeros_like(nibbles), FOUR_AT_ONCE)
    return _dot4(nibbles, low, total + (upper << 8), FOUR_AT_ONCE)


@triton.jit
def _spread(scales, zeros, rows, there, group, GROUPS: tl.constexpr):
    """Scale and zero of some groups of rows."""
    held, places = there[:, None] & (group < GROUPS)[None, :], rows * GROUPS + group[None, :]
    scale = tl.load(scales + places, mask=held, other=0.0).to(tl.float32)
    return scale, tl.load(zeros + places, mask=held, other=0).to(tl.float32)


@triton.jit
def w4_by_rows(
    high, low, x_scales, x_sums, words, scales, zeros, bias, out, N,
    K: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    FOUR_AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A single row of `x`, of which `fixed_row` has made integers, with whole rows of the weight. With an activation,
    rows of the weight's first half gate those of its second, and a program has some of both in turns."""
    HALVES: tl.constexpr = 2 if GROUP < 128 else 1  # of a byte, which then belong to different groups
    SPANS: tl.constexpr = 2 if GROUP == 32 else 1  # of a block's words
    COUNT: tl.constexpr = (K + 127) // 128
    GATED: tl.constexpr = ACTIVATION != ""
    if GATED:
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N) // 2
        there, weight_row = n < N // 2, n + tl.arange(0, BLOCK_N) % 2 * (N // 2)
    else:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        there, weight_row = n < N, n
    rows = weight_row.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCKS * SPANS), dtype=tl.float32)
    for start in tl.static_range(0, COUNT, BLOCKS):
        word = start * 16 + tl.arange(0, BLOCKS * 16)
        inside = there[:, None] & (word < COUNT * 16)[None, :]
        places = words + rows * (COUNT * 16) + word[None, :]
        packed = tl.load(places, mask=inside, other=0, eviction_policy="evict_first")
        span = start * SPANS + tl.arange(0, BLOCKS * SPANS)
        if HALVES == 1:
            scale, zero = _spread(scales, zeros, rows, there, span * 128 // GROUP, K // GROUP)
        if start == 0:
            take_turn(OVERLAP)  # the weight, most of the work, is already on its way
        x_scale = tl.load(x_scales + span // SPANS, mask=span < COUNT * SPANS, other=0.0)
        dots = tl.zeros((BLOCK_N, BLOCKS * 16), dtype=tl.int32)
        for half in tl.static_range(2):
            place, known = word // 16 * 32 + half * 16 + word % 16, word < COUNT * 16
            upper = tl.load(high + place, mask=known, other=0)[None, :]
            lower = tl.load(low + place, mask=known, other=0)[None, :]
            nibbles = (packed >> half * 4) & 0x0F0F0F0F
            dots = _dots(nibbles, upper, lower, dots, FOUR_AT_ONCE)
            if HALVES == 2 or half == 1:
                total = tl.zeros((BLOCKS * SPANS,), dtype=tl.float32)
                for part in tl.static_range(0 if HALVES == 1 else half * 2, half * 2 + 2):
                    if SPANS == 1 or part == half * 2:
                        place = span // SPANS * 4 + part + span % SPANS
                        total += tl.load(x_sums + place, mask=span < COUNT * SPANS, other=0.0)
                if HALVES == 2:
                    group = (span // SPANS * 128 + half * 64 + span % SPANS * 32) // GROUP
                    scale, zero = _spread(scales, zeros, rows, there, group, K // GROUP)
                sums = tl.sum(tl.reshape(dots, (BLOCK_N, BLOCKS * SPANS, 16 // SPANS)), axis=2).to(tl.float32)
                acc += (sums - zero * total[None, :]) * (scale * x_scale[None, :])
                dots = tl.zeros((BLOCK_N, BLOCKS * 16), dtype=tl.int32)
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
    x, packed, scales, zeros, bias, out, x_stride, out_stride, M, N,
    K: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some rows of `x`. The weight is the left side: tensor cores take 64 rows of it. With splits, a program has a part
    of the inputs, and `out` is [splits, M, N] in float32."""
    COUNT: tl.constexpr = (K + 127) // 128
    EACH: tl.constexpr = (COUNT + SPLITS - 1) // SPLITS
    SPAN: tl.constexpr = 32 if GROUP == 32 else 64  # bytes whose lower nibbles are in one group
    kind: tl.constexpr = x.dtype.element_ty
    SURPLUS: tl.constexpr = 128.0 if kind == tl.bfloat16 else 1024.0 if kind == tl.float16 else 0.0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    byte = tl.arange(0, SPAN)
    here, there = (n < N)[:, None], (m < M)[:, None]
    lines = packed + n.to(tl.int64)[:, None] * (COUNT * 64) + byte[None, :]
    x_rows = x + m.to(tl.int64)[:, None] * x_stride + byte[None, :]
    group_rows = n * (K // GROUP)
    first = tl.program_id(2) * EACH
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    take_turn(OVERLAP)
    for span in range(first * (64 // SPAN), tl.minimum(first + EACH, COUNT) * (64 // SPAN)):
        k = span // (64 // SPAN) * 128 + span % (64 // SPAN) * SPAN  # the input of the first lower nibble
        codes = tl.load(lines + span * SPAN, mask=here, other=0)
        low = tl.load(x_rows + k, mask=there & (k + byte < K)[None, :], other=0.0)
        high = tl.load(x_rows + k + 64, mask=there & (k + 64 + byte < K)[None, :], other=0.0)
        if GROUP >= 128:
            dots = tl.dot(_whole_codes(codes & 15, kind), low.T, input_precision="ieee")
            dots = tl.dot(_whole_codes(codes >> 4, kind), high.T, dots, input_precision="ieee")
            total = tl.sum(low.to(tl.float32), axis=1) + tl.sum(high.to(tl.float32), axis=1)
            place = group_rows + k // GROUP
            acc += _scaled(dots, total, scales + place, zeros + place, n < N, SURPLUS)
        else:
            for half in tl.static_range(2):
                x_tile = high if half else low
                nibbles = codes >> 4 if half else codes & 15
                dots = tl.dot(_whole_codes(nibbles, kind), x_tile.T, input_precision="ieee")
                place = group_rows + (k + half * 64) // GROUP
                held = (n < N) & (k + half * 64 < K)
                total = tl.sum(x_tile.to(tl.float32), axis=1)
                acc += _scaled(dots, total, scales + place, zeros + place, held, SURPLUS)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    target = out + (tl.program_id(2) * M + m).to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target, acc.T.to(out.dtype.element_ty), mask=there & (n < N)[None, :])


@triton.jit
def _whole_codes(nibbles, dtype: tl.constexpr):
    """Integers plus the surplus that their type brings."""
    if dtype == tl.bfloat16:
        codes = (nibbles.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        codes = (nibbles.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        codes = nibbles.to(tl.float32)
    return codes


@triton.jit
def _scaled(dots, total, scales, zeros, held, SURPLUS: tl.constexpr):
    """The products of one group's codes [outputs, rows] as those of its values, by the sums of the rows' inputs."""
    zero = tl.load(zeros, mask=held, other=0).to(tl.float32) + SURPLUS
    scale = tl.load(scales, mask=held, other=0.0).to(tl.float32)
    return (dots - zero[:, None] * total[None, :]) * scale[:, None]


@triton.jit
def sum_splits(parts, bias, out, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """The sum over `parts` [splits, M, N], plus the bias."""
    take_turn(OVERLAP)
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * tl.num_programs(1) + row) * N + n
        total += tl.load(parts + place, mask=n < N, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def w4_values(
    packed, scales, zeros, out, N,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The weight itself, a block of inputs for each program."""
    COUNT: tl.constexpr = (K + 127) // 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, inside, byte = n.to(tl.int64)[:, None], (n < N)[:, None], tl.arange(0, 64)
    first = tl.program_id(1) * 128
    codes = tl.load(packed + rows * (COUNT * 64) + tl.program_id(1) * 64 + byte[None, :], mask=inside, other=0)
    for half in tl.static_range(2):
        k = first + half * 64 + byte
        nibbles = (codes >> 4 if half else codes & 15).to(tl.float32)
        held = inside & (k < K)[None, :]
        if GROUP == 32:
            place, known = rows * (K // GROUP) + (k // GROUP)[None, :], held
        else:  # one group
            place, known = rows * (K // GROUP) + (first + half * 64) // GROUP, inside & (first + half * 64 < K)
        zero = tl.load(zeros + place, mask=known, other=0).to(tl.float32)
        scale = tl.load(scales + place, mask=known, other=0.0).to(tl.float32)
        tl.store(out + rows * K + k[None, :], ((nibbles - zero) * scale).to(out.dtype.element_ty), mask=held)


@triton.jit
def w4_tile(
    packed, scales, zeros, first, start, inside,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The values of rows from `first` on and of the block of inputs from `start` on. [BLOCK, 128] float32

    Where the scales are bytes, they stand for powers of two, and the nibbles are floats (E2M1) without zero points."""
    COUNT: tl.constexpr = (K + 127) // 128
    rows = (first + tl.arange(0, BLOCK)).to(tl.int64)[:, None, None]
    half, span, byte = tl.arange(0, 2), tl.arange(0, 2), tl.arange(0, 32)  # spans of 32 inputs are within a group
    lines = packed + rows * (COUNT * 64) + start // 2
    codes = tl.load(lines + span[None, :, None] * 32 + byte[None, None, :], mask=inside[:, None, None], other=0)
    group = (start + half[:, None] * 64 + span[None, :] * 32)[None, :, :] // GROUP
    held, place = inside[:, None, None] & (group < K // GROUP), rows * (K // GROUP) + group
    nibbles = (codes[:, None, :, :] >> (half * 4)[None, :, None, None].to(tl.uint8)) & 15
    if scales.dtype.element_ty == tl.uint8:
        power = tl.load(scales + place, mask=held, other=0).to(tl.int32)
        half_scale = (tl.maximum(power - 1, 0) << 23).to(tl.float32, bitcast=True)
        doubled = ((0xC8643210 >> (nibbles.to(tl.uint32) & 7) * 4) & 15).to(tl.float32)  # one of eight magnitudes
        values = tl.where(nibbles < 8, doubled, -doubled) * half_scale[:, :, :, None]
    else:
        zero = tl.load(zeros + place, mask=held, other=0).to(tl.float32)
        scale = tl.load(scales + place, mask=held, other=0.0).to(tl.float32)
        values = (nibbles.to(tl.float32) - zero[:, :, :, None]) * scale[:, :, :, None]
    return tl.reshape(values, (BLOCK, 128))

"""The device code of products with 4-bit weights: by rows for a single row of `x`, by tiles for some, and dequantising
for many.

Blocks have 128 inputs: 64 bytes (see `reference`), or 16 words. By rows, the inputs become 16-bit integers with a scale
for each quarter of a block: one instruction then multiplies two nibbles with two of them. By tiles, a nibble set into
the fraction of a 16-bit number is a number 128 or 1024 above the integer, which is exact.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from bough.kernels.activation.triton import gated
from bough.kernels.overlap import take_turn


@triton.jit
def fixed_row(
    x, residual, norm_weight, fixed, stream, eps,
    K: tl.constexpr, PLUS_ONE: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some units of a row as integers (`_integers`), behind one another in `fixed`."""
    take_turn(OVERLAP)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    row = _integers(x, residual, norm_weight, stream, eps, unit, True, K, PLUS_ONE, UNITS, WIDTH)
    COUNT: tl.constexpr = (K + 127) // 128 * 4
    four, there = unit[:, None] * 4 + tl.arange(0, 4)[None, :], unit < COUNT
    for part in tl.static_range(4):
        tl.store(fixed + part * COUNT * 4 + four, row[part], mask=there[:, None])
    for part in tl.static_range(3):
        tl.store(fixed + (16 + part) * COUNT + unit, row[4 + part].to(tl.int32, bitcast=True), mask=there)


@triton.jit
def _held_row(fixed, first, COUNT: tl.constexpr, UNITS: tl.constexpr):
    """Units of it from `first` on."""
    unit = first + tl.arange(0, UNITS)
    four, there = unit[:, None] * 4 + tl.arange(0, 4)[None, :], unit < COUNT
    row = ()
    for part in tl.static_range(4):
        row += (tl.load(fixed + part * COUNT * 4 + four, mask=there[:, None], other=0),)
    for part in tl.static_range(3):
        value = tl.load(fixed + (16 + part) * COUNT + unit, mask=there, other=0)
        row += (value.to(tl.float32, bitcast=True),)
    return row


@triton.jit
def _integers(
    x, residual, norm_weight, stream, eps, unit, keeps,
    K: tl.constexpr, PLUS_ONE: tl.constexpr, UNITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Inputs as 16-bit integers, for some units of 16 bytes of the weight: those of its lower and of its upper nibbles
    as `_pairs` has them, sums of both, and a scale for all. The row may be normed first: then all of it is read."""
    k = (unit // 4 * 128 + unit % 4 * 16)[:, None] + tl.arange(0, 16)[None, :]
    low, high = _stream(x, residual, k, K), _stream(x, residual, k + 64, K)
    if residual is not None:
        tl.store(stream + k, low, mask=(k < K) & keeps)
        tl.store(stream + k + 64, high, mask=(k + 64 < K) & keeps)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if norm_weight is not None:
        row = _stream(x, residual, tl.arange(0, WIDTH), K).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(row * row) / K + eps)
        a = (a * inverse * _gain(norm_weight, k, K, PLUS_ONE)).to(low.dtype).to(tl.float32)
        b = (b * inverse * _gain(norm_weight, k + 64, K, PLUS_ONE)).to(low.dtype).to(tl.float32)
    most = tl.maximum(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), axis=1), 1e-30)
    first_a, second_a, sums_a = _pairs(a, 32767.0 / most, UNITS)
    first_b, second_b, sums_b = _pairs(b, 32767.0 / most, UNITS)
    return first_a, second_a, first_b, second_b, sums_a, sums_b, most / 32767.0


@triton.jit
def _stream(x, residual, k, K):
    """Inputs `k` of x + residual."""
    value = tl.load(x + k, mask=k < K, other=0.0)
    if residual is not None:
        held = tl.load(residual + k, mask=k < K, other=0.0)
        value = (value.to(tl.float32) + held.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _gain(norm_weight, k, K, PLUS_ONE: tl.constexpr):
    gain = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
    return gain + 1.0 if PLUS_ONE else gain


@triton.jit
def _pairs(values, inverse, UNITS: tl.constexpr):
    """Values times `inverse` as integers: the first two of each four in a word, the other two, and the units' sums.
    Added to 1.5 * 2^23, a number is rounded to an integer in its last bits."""
    bits = (values * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True)
    pairs = tl.reshape(bits, (UNITS, 4, 2, 2))
    first, second = tl.split(tl.sum((pairs & 0xFFFF) << tl.arange(0, 2)[None, None, None, :] * 16, axis=3))
    return first, second, tl.sum(bits - 0x4B400000, axis=1).to(tl.float32)


@triton.jit
def _dot4(nibbles, first, second, total, PAIRS_AT_ONCE: tl.constexpr):
    """`total` plus the products of four small numbers with two pairs of signed 16-bit integers."""
    if PAIRS_AT_ONCE:
        total = tl.inline_asm_elementwise(
            "{ .reg .s32 half; dp2a.lo.s32.u32 half, $2, $1, $4; dp2a.hi.s32.u32 $0, $3, $1, half; }", "=r,r,r,r,r",
            [nibbles, first, second, total], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total += (nibbles & 15) * (first << 16 >> 16) + (nibbles >> 8 & 15) * (first >> 16)
        total += (nibbles >> 16 & 15) * (second << 16 >> 16) + (nibbles >> 24 & 15) * (second >> 16)
    return total


@triton.jit
def _tile_by_rows(
    words, scales, zeros, first, start, N,
    K: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """What gives the outputs from `first` on, of units from `start` on: the weight, and scales and zeros of each, or of
    its lower and its upper nibbles where these belong to different groups."""
    HALVES: tl.constexpr = 2 if GROUP < 128 else 1
    COUNT: tl.constexpr = (K + 127) // 128 * 4
    if GATED:
        n = first + tl.arange(0, BLOCK_N) // 2
        there, rows = n < N // 2, (n + tl.arange(0, BLOCK_N) % 2 * (N // 2)).to(tl.int64)
    else:
        n = first + tl.arange(0, BLOCK_N)
        there, rows = n < N, n.to(tl.int64)
    word, unit = start * 4 + tl.arange(0, UNITS * 4), start + tl.arange(0, UNITS)
    inside = there[:, None] & (word < COUNT * 4)[None, :]
    places = words + rows[:, None] * (COUNT * 4) + word[None, :]
    packed = tl.load(places, mask=inside, other=0, eviction_policy="evict_first")
    k = (unit // 4 * 128 + unit % 4 * 16)[:, None] + tl.arange(0, HALVES)[None, :] * 64
    held, places = (
        there[:, None, None] & (k < K)[None, :, :],
        rows[:, None, None] * (K // GROUP) + (k // GROUP)[None, :, :],
    )
    scale, zero = tl.load(scales + places, mask=held, other=0.0), tl.load(zeros + places, mask=held, other=0)
    return tl.reshape(packed, (BLOCK_N, UNITS, 4)), scale, zero


@triton.jit
def _products(tile, row, PAIRS_AT_ONCE: tl.constexpr):
    """The products of each unit of a tile with a row. [outputs, units]"""
    packed, scales, zeros = tile
    first_a, second_a, first_b, second_b, sums_a, sums_b, x_scale = row
    low, high = packed & 0x0F0F0F0F, (packed >> 4) & 0x0F0F0F0F
    dots_a = _dot4(low, first_a[None, :, :], second_a[None, :, :], tl.zeros_like(packed), PAIRS_AT_ONCE)
    if scales.shape[2] == 1:
        dots = _dot4(high, first_b[None, :, :], second_b[None, :, :], dots_a, PAIRS_AT_ONCE)
        dots, sums = tl.sum(dots, axis=2)[:, :, None], (sums_a + sums_b)[:, None]
    else:
        dots_b = _dot4(high, first_b[None, :, :], second_b[None, :, :], tl.zeros_like(packed), PAIRS_AT_ONCE)
        dots, sums = tl.join(tl.sum(dots_a, axis=2), tl.sum(dots_b, axis=2)), tl.join(sums_a, sums_b)
    zero = (zeros.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0  # 2^23; conversions are slow
    values = (dots.to(tl.float32) - zero * sums[None, :, :]) * (scales.to(tl.float32) * x_scale[None, :, None])
    return tl.sum(values, axis=2)


@triton.jit
def w4_by_rows(
    x, residual, norm_weight, fixed, words, scales, zeros, bias, out, stream, eps, N,
    K: tl.constexpr, GROUP: tl.constexpr, PLUS_ONE: tl.constexpr, ACTIVATION: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, UNITS: tl.constexpr, PAIRS_AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A single row of `x` with whole rows of the weight. `fixed_row` has made integers of it, or else every program
    does. With an activation, rows of the weight's first half gate those of its second, and a tile has some of both in
    turns."""
    GATED: tl.constexpr = ACTIVATION != ""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of a tile
    COUNT: tl.constexpr = (K + 127) // 128 * 4
    first = tl.program_id(0) * (TILES * OUTPUTS)
    tiles = ()
    for tile in tl.static_range(TILES):
        tiles += (_tile_by_rows(words, scales, zeros, first + tile * OUTPUTS, 0, N, K, GROUP, GATED, BLOCK_N, UNITS),)
    take_turn(OVERLAP)  # the weight, most of the work, is already on its way
    if fixed is None:
        unit, keeps = tl.arange(0, UNITS), tl.program_id(0) == 0
        row = _integers(x, residual, norm_weight, stream, eps, unit, keeps, K, PLUS_ONE, UNITS, UNITS * 32)
    else:
        row = _held_row(fixed, 0, COUNT, UNITS)
    for tile in tl.static_range(TILES):
        sums = _products(tiles[tile], row, PAIRS_AT_ONCE)
        for start in tl.static_range(UNITS, COUNT, UNITS):
            more = _tile_by_rows(words, scales, zeros, first, start, N, K, GROUP, GATED, BLOCK_N, UNITS)
            sums += _products(more, _held_row(fixed, start, COUNT, UNITS), PAIRS_AT_ONCE)
        y, n = tl.sum(sums, axis=1), first + tile * OUTPUTS + tl.arange(0, OUTPUTS)
        if GATED:
            gate, up = tl.split(tl.reshape(y.to(out.dtype.element_ty), (OUTPUTS, 2)))
            tl.store(out + n, gated(gate, up, ACTIVATION), mask=n < N // 2)
        else:
            if bias is not None:
                y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


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

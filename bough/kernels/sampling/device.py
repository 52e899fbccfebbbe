"""The kernels of a sampling step.

`scan_kernel` reads every logit once and leaves, per tile of the vocabulary, the best logit and the tile's mass. That is
all that a greedy or an unfiltered row needs: `pick_kernel` finds the tile, and reads that one tile again. A row's
result never depends on its company: what is summed, and in which order, is fixed by the tile and block sizes.

top-k, top-p and min-p go by search instead of by sorting. From the tiles of the scan alone it follows that everything
kept lies at or above some floor. `gather_kernel` collects the few logits that do, so that the halvings that find the
exact threshold do not read the vocabulary again and again; where they are too many to collect, the halvings do just
that. What is kept is always a bound and a number of ties: all logits above it, and the first so many equal to it.

A *key* is an integer that orders like the logit it is made of, so that a threshold is found by halving a range of
integers. Logits of 16 bits leave the low bits of a float32 unused; `SHIFT` drops them and saves that many halvings.
"""

import triton
import triton.language as tl

from bough.core.seeds import GOLDEN_GAMMA, MIX_LAST_SHIFT, MIX_STEPS
from bough.kernels.sampling.rows import UNIFORM_BITS

GAMMA = tl.constexpr(GOLDEN_GAMMA)
FIRST_SHIFT, FIRST_MULTIPLIER = tl.constexpr(MIX_STEPS[0][0]), tl.constexpr(MIX_STEPS[0][1])
SECOND_SHIFT, SECOND_MULTIPLIER = tl.constexpr(MIX_STEPS[1][0]), tl.constexpr(MIX_STEPS[1][1])
LAST_SHIFT = tl.constexpr(MIX_LAST_SHIFT)
DROPPED_BITS = tl.constexpr(64 - UNIFORM_BITS)
UNIT = tl.constexpr(2.0**-UNIFORM_BITS)


@triton.jit
def mix64(value):
    """`bough.core.seeds.mix64` of a uint64."""
    value = (value ^ (value >> FIRST_SHIFT)) * FIRST_MULTIPLIER
    value = (value ^ (value >> SECOND_SHIFT)) * SECOND_MULTIPLIER
    return value ^ (value >> LAST_SHIFT)


@triton.jit
def uniform(seed, position):
    """The float64 in [0, 1) that belongs to this int64 seed and output position."""
    counted = (position + 1).to(tl.uint64, bitcast=True) * GAMMA
    bits = mix64(mix64(seed.to(tl.uint64, bitcast=True)) + counted)
    return (bits >> DROPPED_BITS).to(tl.int64).to(tl.float64) * UNIT


@triton.jit
def key_of(logit, SHIFT: tl.constexpr):
    """An int32 that orders like the float32 logit, which is not NaN; both zeros have the same."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def logit_of(key, SHIFT: tl.constexpr):
    """The float32 logit whose key this is."""
    spread = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (spread ^ ((spread >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logit, peak, scale):
    """A softmax numerator: 1 for the best token, 0 for a masked one."""
    return tl.exp((logit - peak) * scale)


@triton.jit
def load_tiles(tile_max, tile_sum, tiles, scale, TILES: tl.constexpr):
    """A row's tiles as the scan left them: each one's best logit and its float64 mass; the peak over all. [TILES]

    A tile's sum is relative to its own best logit. Float64 costs nothing on so few numbers, and keeps the cumulative
    masses as exact as the 52 bits of the random number that falls on them.
    """
    places = tl.arange(0, TILES)
    tops = tl.load(tile_max + places, mask=places < tiles, other=float("-inf"))
    sums = tl.load(tile_sum + places, mask=places < tiles, other=0.0)
    peak = tl.max(tops, 0)
    masses = tl.where(sums > 0.0, sums * weight_of(tops, peak, scale), 0.0).to(tl.float64)
    return tops, masses, peak


@triton.jit
def above(source, length, key, peak, scale, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the logits at `source` have a larger key than this one, and their mass. int64, float64"""
    count = tl.full((), 0, tl.int64)
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logits = tl.load(source + at, mask=at < length, other=float("-inf")).to(tl.float32)
        larger = key_of(logits, SHIFT) > key
        count += tl.sum(larger.to(tl.int32), 0)
        mass += tl.sum(tl.where(larger, weight_of(logits, peak, scale), 0.0), 0).to(tl.float64)
    return count, mass


@triton.jit
def find_floor(tops, masses, peak, scale, top_k, top_p, min_p, vocab_size, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The highest key that the tiles prove to lie at or below every kept token. int32

    top-k: when k tiles reach the floor, k tokens do. top-p: the mass below the floor is at most all of the tiles that
    stay below it and, of each other tile, all but its best token, or a floor's weight for each token; half of what
    may be lost is claimed, because sums are rounded. The floor of top-p is no use beside top-k: the mass that top-k
    leaves must be known first.
    """
    keys = key_of(tops, SHIFT)
    best = weight_of(tops, peak, scale).to(tl.float64)
    slack = 0.5 * (1.0 - top_p) * tl.sum(masses, 0)
    low = key_of(peak - float("inf"), SHIFT).to(tl.int64)
    high = key_of(peak, SHIFT).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        key = middle.to(tl.int32)
        weight = weight_of(logit_of(key, SHIFT), peak, scale)
        if top_k < vocab_size:
            holds = tl.sum((keys >= key).to(tl.int32), 0) >= top_k
        else:
            rest = tl.minimum(tl.maximum(masses - best, 0.0), TILE * weight.to(tl.float64))
            lost = tl.sum(tl.where(keys < key, masses, rest), 0)
            holds = ((lost <= slack) & (top_p < 1.0)) | (weight < min_p)
        low = tl.where(holds, middle, low)
        high = tl.where(holds, high, middle - 1)
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["tiles", "groups", "steps"], do_not_specialize_on_alignment=["rows"])  # as `scan_kernel`
def gather_kernel(
    logits, stride, rows, random, temperature, top_k, top_p, min_p, tile_max, tile_sum,
    floors,  # [n] int32
    counts,  # [n, groups] int32: how many of a group reach the floor; more than SEGMENT: they do not fit
    found,  # [n, groups, SEGMENT] those logits, in the order of the vocabulary, then -inf
    found_ids,  # [n, groups, SEGMENT] int32, their token ids
    vocab_size, tiles, groups, steps,
    SHIFT: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    limited = (k < vocab_size) | (p < 1.0) | (least > 0.0)
    if tl.load(random + row) & limited:
        scale = 1.0 / tl.load(temperature + row)
        tops, masses, peak = load_tiles(tile_max + place * tiles, tile_sum + place * tiles, tiles, scale, TILES)
        if tl.abs(peak) < float("inf"):
            floor = find_floor(tops, masses, peak, scale, k, p, least, vocab_size, SHIFT, TILE)
            tl.store(floors + place, floor)
            begin = tl.program_id(1) * steps
            for group in range(begin, tl.minimum(begin + steps, groups)):
                at = group * GROUP + tl.arange(0, GROUP)
                values = tl.load(logits + place * stride + at, mask=at < vocab_size, other=float("-inf"))
                reach = (key_of(values.to(tl.float32), SHIFT) >= floor) & (at < vocab_size)
                ranks = tl.cumsum(reach.to(tl.int32), 0) - 1
                count = tl.sum(reach.to(tl.int32), 0)
                tl.store(counts + place * groups + group, count)
                segment = (place * groups + group) * SEGMENT
                fits = reach & (ranks < SEGMENT)
                tl.store(found + segment + ranks, values, mask=fits)
                tl.store(found_ids + segment + ranks, at, mask=fits)
                slots = tl.arange(0, SEGMENT)
                empty = tl.full((SEGMENT,), float("-inf"), tl.float32).to(values.dtype)
                tl.store(found + segment + slots, empty, mask=slots >= count)


@triton.jit
def lowest_key(
    source, length, low, peak, scale, least, BY_MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest key from `low` on that so many logits, or so much mass, reach. int64"""
    high = key_of(peak, SHIFT).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        count, mass = above(source, length, (middle - 1).to(tl.int32), peak, scale, SHIFT, BLOCK)
        holds = mass >= least if BY_MASS else count >= least
        low = tl.where(holds, middle, low)
        high = tl.where(holds, high, middle - 1)
    return low


@triton.jit
def find_threshold(
    source, length, floor, total, peak, scale, k, p, vocab_size, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """What top-k and top-p keep: all above the key `bound`, and the first `ties` of those at it. int32, float64"""
    bound, ties = floor - 1, tl.full((), 0.0, tl.float64)
    low = floor.to(tl.int64)
    if k < vocab_size:
        low = lowest_key(source, length, low, peak, scale, k, False, SHIFT, BLOCK)
        bound = low.to(tl.int32)
        count, mass = above(source, length, bound, peak, scale, SHIFT, BLOCK)
        ties = (k - count).to(tl.float64)
        total = mass + ties * weight_of(logit_of(bound, SHIFT), peak, scale).to(tl.float64)
    if p < 1.0:
        target = p * total
        low = lowest_key(source, length, low, peak, scale, target, True, SHIFT, BLOCK)
        count, mass = above(source, length, low.to(tl.int32), peak, scale, SHIFT, BLOCK)
        weight = weight_of(logit_of(low.to(tl.int32), SHIFT), peak, scale).to(tl.float64)
        # A weight of zero is reached only when rounding put the target out of reach: then all are kept.
        needed = tl.where(weight > 0.0, tl.ceil((target - mass) / tl.where(weight > 0.0, weight, 1.0)), 1e9)
        needed = tl.maximum(needed, 1.0)
        ties = tl.where((low == bound) & (k < vocab_size), tl.minimum(ties, needed), needed)
        bound = low.to(tl.int32)
    return bound, ties


@triton.jit
def draw_kept(source, length, bound, ties, least, number, peak, scale, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The place among the logits at `source` where the cumulative weight of what is kept passes `number` of its sum."""
    total = tl.full((), 0.0, tl.float64)
    for turn in tl.static_range(2):  # the sum first, then the place
        target = number * total
        place = tl.full((), 0, tl.int32)
        last = tl.full((), 0, tl.int32)
        before = tl.full((), 0.0, tl.float64)
        seen = tl.full((), 0.0, tl.float64)
        for first in range(0, length, BLOCK):
            at = first + tl.arange(0, BLOCK)
            logits = tl.load(source + at, mask=at < length, other=float("-inf")).to(tl.float32)
            keys, weights = key_of(logits, SHIFT), weight_of(logits, peak, scale)
            tied = keys == bound
            ranks = seen + tl.cumsum(tied.to(tl.int32), 0).to(tl.float64)
            kept = ((keys > bound) | (tied & (ranks <= ties))) & (weights >= least)
            mass = tl.where(kept, weights, 0.0).to(tl.float64)
            if turn == 1:
                passed = (before + tl.cumsum(mass, 0) <= target) & (at < length)
                place += tl.sum(passed.to(tl.int32), 0)
                last = tl.maximum(last, tl.max(tl.where(mass > 0.0, at, 0), 0))
            before += tl.sum(mass, 0)
            seen += tl.sum(tied.to(tl.int32), 0).to(tl.float64)
        total = before
    return tl.minimum(place, last)


@triton.jit
def draw_filtered(
    line, found, found_ids, counts, floor, groups, total, peak, scale, k, p, least, number, vocab_size,
    SHIFT: tl.constexpr, GROUPS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of a row with filters: searched among the gathered logits if all of them fitted, else among all."""
    numbers = tl.arange(0, GROUPS)
    fullest = tl.max(tl.load(counts + numbers, mask=numbers < groups, other=0), 0)
    gathered = fullest <= SEGMENT
    source = line
    length = tl.full((), 0, tl.int32) + vocab_size
    if gathered:
        source = found
        length = tl.full((), 0, tl.int32) + groups * SEGMENT
    bound, ties = find_threshold(source, length, floor, total, peak, scale, k, p, vocab_size, SHIFT, BLOCK)
    token = draw_kept(source, length, bound, ties, least, number, peak, scale, SHIFT, BLOCK)
    if gathered:
        token = tl.load(found_ids + token)
    return token


# Counts are left general, and so is where the rows' numbers begin: no batch must wait for a kernel of its own.
@triton.jit(do_not_specialize=["tiles", "steps"], do_not_specialize_on_alignment=["rows"])
def scan_kernel(
    logits, stride, rows, random, temperature,
    tile_max,  # [n, tiles]
    tile_sum,  # [n, tiles], left alone for rows that are greedy
    vocab_size, tiles, steps,
    STEP: tl.constexpr,  # tiles read at once
    TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    drawn = tl.load(random + row)
    scale = 1.0 / tl.load(temperature + row)
    line = logits + place * stride
    for step in range(steps):
        numbers = (tl.program_id(1) * steps + step) * STEP + tl.arange(0, STEP)
        at = numbers[:, None] * TILE + tl.arange(0, TILE)[None, :]
        values = tl.load(line + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        values = tl.where(values != values, float("inf"), values)  # NaN fails the row just as +inf does
        tops = tl.max(values, 1)
        tl.store(tile_max + place * tiles + numbers, tops, mask=numbers < tiles)
        if drawn:
            origin = tl.where(tops == float("-inf"), 0.0, tops)
            sums = tl.sum(weight_of(values, origin[:, None], scale), 1)
            tl.store(tile_sum + place * tiles + numbers, sums, mask=numbers < tiles)


@triton.jit
def first_best(line, tops, peak, vocab_size, TILES: tl.constexpr, TILE: tl.constexpr):
    """The first token whose logit is the peak."""
    tile = tl.min(tl.where(tops == peak, tl.arange(0, TILES), TILES), 0)
    at = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(line + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(logits == peak, at, vocab_size), 0)


@triton.jit
def draw_any(line, masses, number, peak, scale, vocab_size, TILES: tl.constexpr, TILE: tl.constexpr):
    """The token at which the cumulative weight passes `number` of the total: the tile first, then the place in it."""
    places = tl.arange(0, TILES)
    passed = tl.cumsum(masses, 0) <= number * tl.sum(masses, 0)
    tile = tl.minimum(tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(masses > 0.0, places, 0), 0))
    left = number * tl.sum(masses, 0) - tl.sum(tl.where(places < tile, masses, 0.0), 0)
    at = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(line + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    weights = weight_of(logits, peak, scale).to(tl.float64)
    inside = tl.sum((tl.cumsum(weights, 0) <= left).to(tl.int32), 0)
    # The tile's sum and the steps through it are rounded differently: never step past its last token with a weight.
    return tl.minimum(tile * TILE + inside, tl.max(tl.where(weights > 0.0, at, 0), 0))


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["rows"])
def pick_kernel(
    logits, stride, rows, random, temperature, top_k, top_p, min_p, seed, generated, tile_max, tile_sum, floors, counts,
    found, found_ids,
    tokens,  # [n] int64
    bad,  # [n] bool
    vocab_size, tiles, groups,
    batch,  # of lines in columns: how many a column has; 0: all are of rows of their own
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    line = logits + place * stride
    scale = 1.0 / tl.load(temperature + row)
    tops, masses, peak = load_tiles(tile_max + place * tiles, tile_sum + place * tiles, tiles, scale, TILES)
    usable = tl.abs(peak) < float("inf")
    position = tl.load(generated + row)
    if batch:
        position += place // batch
    else:
        tl.store(generated + row, position + 1)
    token = tl.full((), 0, tl.int32)
    if usable:
        if tl.load(random + row):
            number = uniform(tl.load(seed + row), position)
            token = draw_any(line, masses, number, peak, scale, vocab_size, TILES, TILE)
            if FILTERED:  # by itself, so that it is decided when the kernel is compiled
                k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
                if (k < vocab_size) | (p < 1.0) | (least > 0.0):
                    token = draw_filtered(
                        line, found + place * groups * SEGMENT, found_ids + place * groups * SEGMENT,
                        counts + place * groups, tl.load(floors + place), groups, tl.sum(masses, 0), peak, scale, k, p,
                        least, number, vocab_size, SHIFT, GROUPS, SEGMENT, BLOCK,
                    )  # fmt: skip
        else:
            token = first_best(line, tops, peak, vocab_size, TILES, TILE)
    tl.store(tokens + place, token.to(tl.int64))
    tl.store(bad + place, usable == 0)

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""top-k, top-p and min-p on the device, by search instead of by sorting.

From the tiles of the scan alone it follows that everything kept lies at or above some floor. `gather_kernel` collects
the few logits that do, so that the halvings that find the exact threshold do not read the vocabulary again and again;
where they are too many to collect, the halvings do just that. What is kept is always a bound and a number of ties: all
logits above it, and the first so many equal to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bough.kernels.sampling.triton_tools import above, key_of, load_tiles, logit_of, weight_of


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
def find_threshold(
    source, length, floor, total, peak, scale, k, p, vocab_size, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """What top-k and top-p keep: all above the key `bound`, and the first `ties` of those at it. int32, float64"""
    bound, ties = floor - 1, tl.full((), 0.0, tl.float64)
    low = floor.to(tl.int64)
    if k < vocab_size:
        high = key_of(peak, SHIFT).to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            count, mass = above(source, length, (middle - 1).to(tl.int32), peak, scale, SHIFT, BLOCK)
            holds = count >= k
            low = tl.where(holds, middle, low)
            high = tl.where(holds, high, middle - 1)
        bound = low.to(tl.int32)
        count, mass = above(source, length, bound, peak, scale, SHIFT, BLOCK)
        ties = (k - count).to(tl.float64)
        total = mass + ties * weight_of(logit_of(bound, SHIFT), peak, scale).to(tl.float64)
    if p < 1.0:
        target = p * total
        high = key_of(peak, SHIFT).to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            count, mass = above(source, length, (middle - 1).to(tl.int32), peak, scale, SHIFT, BLOCK)
            holds = mass >= target
            low = tl.where(holds, middle, low)
            high = tl.where(holds, high, middle - 1)
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

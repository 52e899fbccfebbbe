"""Routing in Triton: a program chooses for one token and counts what each expert gets; then pairs of token and expert
are put in order, so that those of one expert stand together.

The one piece of state is a row of counters on each device, zero between layers: `experts.triton` clears them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bough.core.model_config import MoEConfig
from bough.kernels.experts.reference import Spread
from bough.kernels.ops import Norm, Router
from bough.kernels.overlap import overlap, take_turn, zeros_of_stream

MAX_EXPERTS = 1024
PAIRS = 1024  # that a program puts in order
TILES = 128  # that a program describes
FEW_ROWS = 4  # each of which is multiplied with the router by itself
PART = 4  # experts whose logits a program then computes
TILE = 16  # tokens and experts of a program on tensor cores
MOST_TILES = 64


class Routed(NamedTuple):
    """The choices of all tokens; a pair is one token with one of its experts, in the order of tokens."""

    ids: torch.Tensor  # [tokens, per_token + appended] int32
    weights: torch.Tensor  # like ids, float32
    ranks: torch.Tensor | None = None  # like ids, int32: the how-manieth of its expert a pair is


class Order(NamedTuple):
    """Pairs by expert, and the tiles of rows that they make."""

    pairs: torch.Tensor  # [pairs] int32
    tiles: torch.Tensor  # [tiles, 3] int32: expert, first place in `pairs`, rows (0: there is no such tile)


def route(logits: torch.Tensor, moe: MoEConfig, bias: torch.Tensor | None, *, count: bool) -> Routed:
    """As the reference; with `count`, the experts' counters are raised."""
    rows = logits.shape[0]
    routed = _empty(rows, moe, logits.device, count)
    _route[(rows,)](
        logits, bias, *routed, counters(logits.device), logits.stride(0), moe.scale, MOE=moe,
        num_warps=1 if moe.experts <= 256 else 2, **overlap(rows),
    )  # fmt: skip
    return routed


def norm_route(
    x: torch.Tensor,  # [rows, hidden], at most 1,024
    residual: torch.Tensor | None,  # like x
    norm: Norm,
    router: Router,  # contiguous
    moe: MoEConfig,
    *,
    count: bool,
) -> tuple[Routed, torch.Tensor, torch.Tensor]:
    """The choices by the norm of x + residual, that norm, and the sum, which is the next residual; one launch.
    `residual` stays as it is."""
    rows, hidden = x.shape
    routed = _empty(rows, moe, x.device, count)
    normed, stream = x.new_empty((rows, hidden)), x if residual is None else x.new_empty((rows, hidden))
    logits = torch.empty((rows, moe.experts), dtype=torch.float32, device=x.device)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    common = (x, residual, norm.weight, *router, logits, _arrivals(x.device), stream, normed)
    if rows <= FEW_ROWS and not count:
        _norm_route[(triton.cdiv(moe.experts, PART), rows)](
            *common, routed.ids, routed.weights, *strides, norm.eps, moe.scale,
            H=hidden, BLOCK_H=triton.next_power_of_2(hidden), PLUS_ONE=norm.plus_one, PART=PART, MOE=moe,
            num_warps=4, **overlap(rows),
        )  # fmt: skip
    else:
        _norm_route_tiles[(triton.cdiv(moe.experts, TILE), triton.cdiv(rows, TILE))](
            *common, *routed, counters(x.device), rows, *strides, norm.eps, moe.scale,
            H=hidden, BLOCK_H=256, PLUS_ONE=norm.plus_one, ROWS=TILE, PART=TILE, MOE=moe,
            num_warps=4, num_stages=3, **overlap(rows),
        )  # fmt: skip
    return routed, normed, stream


def _empty(rows: int, moe: MoEConfig, device: torch.device, count: bool) -> Routed:
    shape = (rows, moe.per_token + moe.appended)
    ids, weights = (torch.empty(shape, dtype=kind, device=device) for kind in (torch.int32, torch.float32))
    return Routed(ids, weights, torch.empty_like(ids) if count else None)


def placed(routed: Routed, spread: Spread | None, *, count: bool) -> Routed:
    """The choices as places of matrices that are spread, in the memory of the ids, and the loads counted; without a
    `spread` they are places. With `count`, the counters of places that are here are raised."""
    (tokens, top), device = routed.ids.shape, routed.ids.device
    ranks = torch.empty_like(routed.ids) if count else None
    tables = (None, None, None) if spread is None else (spread.places, spread.copies, spread.loads)
    _place[(triton.cdiv(tokens * top, PAIRS),)](
        routed.ids, *tables, ranks, counters(device), tokens * top,
        TOP=top, MOST=1 if spread is None else spread.places.shape[1], PAIRS=PAIRS, num_warps=8, **overlap(tokens),
    )  # fmt: skip
    return routed._replace(ranks=ranks)


def put_in_order(routed: Routed, experts: int, tile_rows: int) -> Order:
    """The pairs by expert, in tiles of up to `tile_rows`."""
    assert routed.ranks is not None, "pairs that were not counted cannot be put in order"
    pairs, device = routed.ids.numel(), routed.ids.device
    tiles = most_tiles(pairs, experts, tile_rows)
    order = Order(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in ((pairs,), (tiles, 3))))
    _order[(max(triton.cdiv(pairs, PAIRS), triton.cdiv(tiles, TILES)),)](
        routed.ids, routed.ranks, counters(device), order.pairs, order.tiles, pairs, tiles,
        E=experts, BLOCK_E=triton.next_power_of_2(experts), TILE_ROWS=tile_rows, PAIRS=PAIRS, TILES=TILES,
        num_warps=8, **overlap(routed.ids.shape[0]),
    )  # fmt: skip
    return order


def most_tiles(pairs: int, experts: int, tile_rows: int) -> int:
    """However the pairs are spread: each expert with pairs may have one tile that is not full."""
    return min(pairs, pairs // tile_rows + experts)


def counters(device: torch.device) -> torch.Tensor:
    """How many pairs each expert has got."""
    return zeros_of_stream("pairs of experts", MAX_EXPERTS, device)


def _arrivals(device: torch.device) -> torch.Tensor:
    """How many programs have computed their part of a tile's logits: zero between layers."""
    return zeros_of_stream("tiles of logits", MOST_TILES, device)


@triton.jit
def _route(logits, bias, ids, weights, ranks, counts, stride, scale, MOE: tl.constexpr, OVERLAP: tl.constexpr):
    E: tl.constexpr = MOE.experts
    BLOCK_E: tl.constexpr = triton.next_power_of_2(MOE.experts)
    row, expert = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, BLOCK_E)[None, :]
    take_turn(OVERLAP)
    values = tl.load(logits + row.to(tl.int64)[:, None] * stride + expert, mask=expert < E, other=float("-inf"))
    _choose(values, row, row >= 0, bias, ids, weights, ranks, counts, scale, MOE)


@triton.jit
def _norm_route(
    x, residual, norm_weight, router, bias, logit_bias, logits, arrivals, stream, normed, ids, weights, x_stride,
    residual_stride, eps, scale,
    H: tl.constexpr, BLOCK_H: tl.constexpr, PLUS_ONE: tl.constexpr, PART: tl.constexpr, MOE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has a part of the experts for one token; the last to arrive chooses among all."""
    E: tl.constexpr = MOE.experts
    BLOCK_E: tl.constexpr = triton.next_power_of_2(MOE.experts)
    part, row = tl.program_id(0), tl.program_id(1)
    own, h = part * PART + tl.arange(0, PART), tl.arange(0, BLOCK_H)
    inside = (own < E)[:, None] & (h < H)[None, :]
    w = tl.load(router + own[:, None] * H + h[None, :], mask=inside, other=0.0)
    gain = tl.load(norm_weight + h, mask=h < H, other=0.0).to(tl.float32)
    if PLUS_ONE:
        gain += 1.0
    take_turn(OVERLAP)  # the weights are already on their way
    values = tl.load(x + row * x_stride + h, mask=h < H, other=0.0)
    if residual is not None:
        held = tl.load(residual + row * residual_stride + h, mask=h < H, other=0.0)
        values = (values.to(tl.float32) + held.to(tl.float32)).to(values.dtype)
        tl.store(stream + row * H + h, values, mask=(h < H) & (part == 0))
    wide = values.to(tl.float32)
    values = (wide * tl.rsqrt(tl.sum(wide * wide) / H + eps) * gain).to(values.dtype)
    tl.store(normed + row * H + h, values, mask=(h < H) & (part == 0))
    product = tl.sum(w.to(tl.float32) * values.to(tl.float32)[None, :], axis=1)
    if logit_bias is not None:
        product += tl.load(logit_bias + own, mask=own < E, other=0.0).to(tl.float32)
    tl.store(logits + row * E + own, product, mask=own < E)
    tl.debug_barrier()  # all threads of the program have written before one of them says so
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrivals + row, 0)  # as the next layer finds it
        expert, rows = tl.arange(0, BLOCK_E)[None, :], row + tl.arange(0, 1)
        places = logits + rows[:, None] * E + expert
        all_values = tl.load(places, mask=expert < E, other=float("-inf"), cache_modifier=".cg")
        _choose(all_values, rows, rows >= 0, bias, ids, weights, None, None, scale, MOE)


@triton.jit(do_not_specialize=["rows"])
def _norm_route_tiles(
    x, residual, norm_weight, router, bias, logit_bias, logits, arrivals, stream, normed, ids, weights, ranks, counts,
    rows, x_stride, residual_stride, eps, scale,
    H: tl.constexpr, BLOCK_H: tl.constexpr, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    MOE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The same for a tile of tokens, on tensor cores."""
    E: tl.constexpr = MOE.experts
    BLOCK_E: tl.constexpr = triton.next_power_of_2(MOE.experts)
    part, tile = tl.program_id(0), tl.program_id(1)
    row, own = tile * ROWS + tl.arange(0, ROWS), part * PART + tl.arange(0, PART)
    there = (row < rows)[:, None]
    take_turn(OVERLAP)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H))[None, :]
        values = _summed(x, residual, row, h, x_stride, residual_stride, there & (h < H))
        if residual is not None:
            tl.store(stream + row[:, None] * H + h, values, mask=there & (h < H) & (part == 0))
        squares += tl.sum(values.to(tl.float32) * values.to(tl.float32), axis=1)
    shrink = tl.rsqrt(squares / H + eps)[:, None]
    acc = tl.zeros((ROWS, PART), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        h = (start + tl.arange(0, BLOCK_H))[None, :]
        w = tl.load(router + own[:, None] * H + h, mask=(own < E)[:, None] & (h < H), other=0.0)
        gain = tl.load(norm_weight + h, mask=h < H, other=0.0).to(tl.float32)
        if PLUS_ONE:
            gain += 1.0
        values = _summed(x, residual, row, h, x_stride, residual_stride, there & (h < H))
        values = (values.to(tl.float32) * shrink * gain).to(values.dtype)
        tl.store(normed + row[:, None] * H + h, values, mask=there & (h < H) & (part == 0))
        acc = tl.dot(values, w.T, acc, input_precision="ieee")
    if logit_bias is not None:
        acc += tl.load(logit_bias + own, mask=own < E, other=0.0).to(tl.float32)[None, :]
    tl.store(logits + row[:, None] * E + own[None, :], acc, mask=there & (own < E)[None, :])
    tl.debug_barrier()  # all threads of the program have written before one of them says so
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrivals + tile, 0)  # as the next layer finds it
        expert = tl.arange(0, BLOCK_E)[None, :]
        places = logits + row[:, None] * E + expert
        all_values = tl.load(places, mask=there & (expert < E), other=float("-inf"), cache_modifier=".cg")
        # Rows that are not there get some value to choose by: infinities would give none.
        all_values = tl.where(there, all_values, 0.0)
        _choose(all_values, row, row < rows, bias, ids, weights, ranks, counts, scale, MOE)


@triton.jit
def _summed(x, residual, row, h, x_stride, residual_stride, mask):
    """x + residual, rounded as the next layer will read it."""
    values = tl.load(x + row[:, None] * x_stride + h, mask=mask, other=0.0)
    if residual is not None:
        held = tl.load(residual + row[:, None] * residual_stride + h, mask=mask, other=0.0)
        values = (values.to(tl.float32) + held.to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def _choose(values, row, there, bias, ids, weights, ranks, counts, scale, MOE: tl.constexpr):
    """Writes the experts of tokens `row` where they are `there`, by their logits `values` [rows, experts]."""
    E: tl.constexpr = MOE.experts
    K: tl.constexpr = MOE.per_token
    BLOCK_E: tl.constexpr = triton.next_power_of_2(E)
    BLOCK_K: tl.constexpr = triton.next_power_of_2(K + MOE.appended)
    expert, slot = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    if MOE.simulate == "uniform":
        mixed = (row + 1).to(tl.uint32)[:, None] * 0x9E3779B1
        mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B
        mixed = mixed ^ (mixed >> 13)
        step = 1 + (mixed >> 16) % (E // K)
        chosen = (((mixed & 0xFFFF) % E + slot.to(tl.uint32) * step) % E).to(tl.int32)
        kept = tl.full(chosen.shape, 1.0 / K, dtype=tl.float32)
    else:
        values = values.to(tl.float32)
        if MOE.scores == "sparsemixer":
            scores = tl.where(expert < E, values, float("-inf"))
        elif MOE.scores == "sigmoid":
            scores = tl.where(expert < E, tl.sigmoid(values), 0.0)
        else:
            raised = tl.where(expert < E, tl.exp(values - tl.max(values, axis=1)[:, None]), 0.0)
            scores = raised / tl.sum(raised, axis=1)[:, None]
        choice = scores
        if bias is not None:
            choice += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)
        choice = tl.where(expert < E, choice, float("-inf"))
        if MOE.groups > 1:
            choice = _best_groups(choice, expert, MOE)
        chosen = tl.zeros((values.shape[0], BLOCK_K), dtype=tl.int32)
        kept = tl.zeros((values.shape[0], BLOCK_K), dtype=tl.float32)
        for k in tl.static_range(K):
            best = tl.argmax(choice, axis=1)[:, None]
            chosen = tl.where(slot == k, best, chosen)
            if MOE.scores == "sparsemixer":  # its weight among those near it that are left
                top = tl.max(choice, axis=1)[:, None]
                near = top - scores <= 2 * MOE.jitter * tl.maximum(tl.abs(scores), top)
                own = 1.0 / tl.sum(tl.where(near, tl.exp(choice - top), 0.0), axis=1)
            else:
                own = tl.sum(tl.where(expert == best, scores, 0.0), axis=1)
            kept = tl.where(slot == k, own[:, None], kept)
            choice = tl.where(expert == best, float("-inf"), choice)
        if MOE.renormalise and MOE.scores != "sparsemixer":
            kept = kept / tl.sum(kept, axis=1)[:, None]
    chosen = tl.where(slot < K, chosen, E + slot - K)
    kept = tl.where(slot < K, kept * scale, 1.0)
    place, wanted = row[:, None] * (K + MOE.appended) + slot, there[:, None] & (slot < K + MOE.appended)
    tl.store(ids + place, chosen, mask=wanted)
    tl.store(weights + place, kept, mask=wanted)
    if ranks is not None:
        tl.store(ranks + place, tl.atomic_add(counts + chosen, 1, mask=wanted, sem="relaxed"), mask=wanted)


@triton.jit
def _best_groups(choice, expert, MOE: tl.constexpr):
    """`choice` where it belongs to one of the best groups, which stand for their best expert or best two."""
    GROUPS: tl.constexpr = MOE.groups
    TOP_GROUPS: tl.constexpr = MOE.top_groups
    SIZE: tl.constexpr = MOE.experts // GROUPS
    group = expert // SIZE
    score = tl.full(choice.shape, float("-inf"), dtype=tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where(group == g, choice, float("-inf"))
        value = tl.max(own, axis=1)[:, None]
        if MOE.group_score == "best_two":
            without = tl.where(expert == tl.argmax(own, axis=1)[:, None], float("-inf"), own)
            value += tl.max(without, axis=1)[:, None]
        score = tl.where(group == g, value, score)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(score, axis=1)[:, None] // SIZE
        score = tl.where(group == best, float("-inf"), score)
    return tl.where(score == float("-inf"), choice, float("-inf"))


@triton.jit(do_not_specialize=["pairs"])
def _place(
    ids, places, copies, loads, ranks, counts, pairs,
    TOP: tl.constexpr, MOST: tl.constexpr, PAIRS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    there = pair < pairs
    take_turn(OVERLAP)
    found = tl.load(ids + pair, mask=there, other=0)
    if loads is not None:
        tl.atomic_add(loads + found, 1, mask=there, sem="relaxed")
    if places is not None:
        copy = pair // TOP % tl.load(copies + found, mask=there, other=1)
        found = tl.load(places + found * MOST + copy, mask=there, other=-1)
        tl.store(ids + pair, found, mask=there)
    if ranks is not None:
        here = there & (found >= 0)
        tl.store(ranks + pair, tl.atomic_add(counts + found, 1, mask=here, sem="relaxed"), mask=here)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _order(
    ids, ranks, counts, order, table, pairs, tiles,
    E: tl.constexpr, BLOCK_E: tl.constexpr, TILE_ROWS: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, BLOCK_E)
    take_turn(OVERLAP)
    count = tl.load(counts + expert, mask=expert < E, other=0)
    first = tl.cumsum(count, axis=0) - count  # place of each expert's first pair

    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    own = tl.load(ids + pair, mask=pair < pairs, other=-1)
    rank = tl.load(ranks + pair, mask=own >= 0, other=0)
    tl.store(order + tl.gather(first, tl.maximum(own, 0), axis=0) + rank, pair, mask=own >= 0)

    cut = (count + TILE_ROWS - 1) // TILE_ROWS
    end = tl.cumsum(cut, axis=0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    if tl.program_id(0) * TILES < tiles:
        owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        there = owner < E
        owner = tl.where(there, owner, 0)
        done = (tile - tl.gather(end - cut, owner, axis=0)) * TILE_ROWS  # rows of that expert in tiles before
        rows = tl.where(there, tl.minimum(tl.gather(count, owner, axis=0) - done, TILE_ROWS), 0)
        tl.store(table + tile * 3, owner, mask=tile < tiles)
        tl.store(table + tile * 3 + 1, tl.gather(first, owner, axis=0) + done, mask=tile < tiles)
        tl.store(table + tile * 3 + 2, rows, mask=tile < tiles)

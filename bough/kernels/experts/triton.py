"""Mixtures of experts in Triton: gate·up with its activation is one launch, down with the weights another.

For up to two tokens each reads its experts' rows for itself; for up to 16 tokens, tiles find their rows by themselves;
for more, pairs of token and expert are put in order first. Weights of 8 bits are read as they are; where experts have
many rows, those are quantised too.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from bough.core.model_config import MoEConfig
from bough.kernels.activation.triton import gated_mul
from bough.kernels.experts import device
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.experts.reference import Matrices, Spread, clamped_mul
from bough.kernels.lora.reference import group_pairs
from bough.kernels.lora.triton import lora_
from bough.kernels.ops import ExpertMatrices, Norm, Router
from bough.kernels.overlap import overlap
from bough.kernels.quantize_rows.reference import GROUP, QuantizedRows
from bough.kernels.quantize_rows.triton import quantize_rows
from bough.kernels.routing.triton import Order, Routed, counters, norm_route, placed, put_in_order, route
from bough.kernels.shared_memory import shared_bytes
from bough.kernels.w4_linear.reference import W4Rows

MAX_TOKENS_BY_ROWS = 2  # beyond, an expert that two tokens share would be read twice
MAX_TOKENS_UNSORTED = 16  # rows of the smallest tile

MAX_TOKENS_NORMED = 512  # beyond, norm and router are faster as launches of their own


@dataclass(frozen=True, slots=True)
class Cut:
    """Of one product by tiles."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of both products of a layer; they have the same rows."""

    block_m: int
    swap: bool  # the weight is the side of which tensor cores take 64 rows
    described: bool  # weights are read through tensor descriptors, which spares the threads their addresses
    gate_up: Cut
    down: Cut
    small_rows: bool = False  # rows get 8 bits, as weights of 8 bits have them; else these take the type of the rows


@dataclass(frozen=True, slots=True)
class RowCut:
    """Of one product by rows."""

    block_n: int
    num_warps: int


GATE_UP_BY_ROWS = RowCut(4, 4)
DOWN_BY_ROWS = RowCut(4, 4)


INVARIANT_TILING = Tiling(64, False, True, Cut(64, 64, 4, 4), Cut(128, 64, 4, 3))  # for any number of tokens
INVARIANT_FP8 = Tiling(64, False, True, Cut(64, 128, 4, 4), Cut(128, 128, 4, 3), small_rows=True)


def config_for(tokens: int, top: int, experts: int, fp8: bool = False, grouped: bool = False) -> Tiling:
    """By how many rows an expert has on average. Up to some dozens the time is that of reading the weights. Of `fp8`
    weights a tile has at most one group of 128 inputs, whose sums take registers of their own if it is `grouped`."""
    rows = tokens * top / experts
    if fp8:
        if tokens <= MAX_TOKENS_UNSORTED or rows <= 10:
            return Tiling(16, True, False, Cut(64, 128, 4, 4), Cut(64, 128, 4, 5))
        if rows <= 24:
            return Tiling(32, True, False, Cut(64, 128, 4, 4), Cut(128, 128, 4, 4))
        if rows <= 96:
            return INVARIANT_FP8
        if grouped:
            return Tiling(128, False, True, Cut(64, 128, 8, 4), Cut(128, 128, 8, 3), small_rows=True)
        return Tiling(128, False, True, Cut(128, 128, 8, 4), Cut(256, 128, 8, 3), small_rows=True)
    if tokens <= MAX_TOKENS_UNSORTED or rows <= 10:
        return Tiling(16, True, False, Cut(64, 128, 4, 3), Cut(64, 64, 4, 5))
    if rows <= 24:
        return Tiling(32, True, False, Cut(64, 64, 4, 3), Cut(128, 64, 4, 5))
    if rows <= 96:
        return INVARIANT_TILING
    return Tiling(128, False, True, Cut(128, 64, 8, 4), Cut(256, 64, 8, 3))


def w4_config_for(tokens: int, top: int, experts: int) -> Tiling:
    """Of weights of 4 bits: a tile has a block of 128 inputs, and the weight is the side that tensor cores take from
    registers, where it was given 16 bits."""
    rows = tokens * top / experts
    if tokens <= MAX_TOKENS_UNSORTED or rows <= 10:
        return Tiling(16, True, False, Cut(64, 128, 4, 4), Cut(64, 128, 4, 4))
    if rows <= 24:
        return Tiling(32, True, False, Cut(64, 128, 4, 3), Cut(64, 128, 4, 3))
    return Tiling(64, True, False, Cut(64, 128, 4, 3), Cut(128, 128, 8, 3))


def fitted(tiling: Tiling, row_bytes: int, weight_bytes: int, room: int) -> Tiling:
    """The tiling with no more in flight than shared memory holds; with shorter tiles, if it does not hold two. Bytes
    are those of a number."""
    rows = tiling.block_m * (1 if tiling.small_rows else row_bytes)
    return replace(
        tiling,
        gate_up=_fitted(tiling.gate_up, rows, 2 * weight_bytes, room),
        down=_fitted(tiling.down, rows, weight_bytes, room),
    )


def _fitted(cut: Cut, rows: int, weight_bytes: int, room: int) -> Cut:
    stage = (rows + weight_bytes * cut.block_n) * cut.block_k
    if 2 * stage > room:
        return _fitted(replace(cut, block_k=cut.block_k // 2), rows, weight_bytes, room)
    return replace(cut, num_stages=min(cut.num_stages, room // stage))


SUM_WIDTH = 1024
PIECE = 256  # inputs that a warp reads at once: each then sums rows of its own


def routed_experts(
    x: torch.Tensor,  # [tokens, hidden]
    logits: torch.Tensor,  # [tokens, experts], the router's
    bias: torch.Tensor | None,  # [experts], counts when choosing only
    moe: MoEConfig,
    matrices: ExpertMatrices,
    activation: str,
    scale: torch.Tensor | None = None,  # [experts], what their weights are multiplied with
    *,
    invariant: bool = False,  # in tiles of one size: where a row stands in its tile makes no difference to its sums
) -> torch.Tensor:
    """The weighted sum of the experts that the logits choose for each row."""
    tiling, count = None, counts(x, matrices)
    if invariant:
        tiling = INVARIANT_FP8 if isinstance(matrices.gate_up, QuantizedRows) else INVARIANT_TILING
        count = matrices.spread is None
    x, routed = weighed(x, route(logits, moe, bias, count=count), moe, scale)
    return multiply(x, matrices, routed, activation, config=tiling)


def counts(x: torch.Tensor, matrices: ExpertMatrices) -> bool:
    """Whether the router is to count the pairs of each expert. If experts are spread, those of its copies count."""
    return x.shape[0] > MAX_TOKENS_UNSORTED and matrices.spread is None


def weighed(
    x: torch.Tensor, routed: Routed, moe: MoEConfig, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, Routed]:
    """What the experts multiply, and the choices with what they multiply their results with."""
    if scale is not None:  # where kernels are compiled and not launched, ids are what the memory held
        routed = routed._replace(weights=routed.weights * scale[routed.ids.clamp(0, len(scale) - 1)])
    if moe.scales_inputs:
        x, routed = (x * routed.weights).to(x.dtype), routed._replace(weights=torch.ones_like(routed.weights))
    return x, routed


def normed_experts(
    x: torch.Tensor,  # [tokens, hidden], at most 512
    residual: torch.Tensor | None,
    norm: Norm,
    router: Router,
    moe: MoEConfig,
    matrices: ExpertMatrices,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts' sum for the norm of x + residual, that norm, and x + residual, which is the next residual."""
    routed, normed, stream = norm_route(x, residual, norm, router, moe, count=counts(x, matrices))
    x, routed = weighed(normed, routed, moe)
    return multiply(x, matrices, routed, activation), normed, stream


def multiply(
    x: torch.Tensor,
    matrices: ExpertMatrices,  # all contiguous
    routed: Routed,  # counted, unless there are few tokens or experts are spread
    activation: str,
    *,
    config: Tiling | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in float32."""
    spread = matrices.spread
    if spread is None:
        return _products(x, matrices, routed, activation, config)
    if spread.chosen is not None:
        spread.chosen.keep(routed.ids)

    def counted(rows: torch.Tensor, routed: Routed, spread: Spread | None) -> torch.Tensor:
        routed = placed(routed, spread, count=config is not None or rows.shape[0] > MAX_TOKENS_UNSORTED)
        return _products(rows, matrices, routed, activation, config)

    if spread.dispatch is None:
        return counted(x, routed, spread)
    sent = placed(routed, spread, count=False)
    return spread.dispatch(
        x, sent.ids, sent.weights, lambda rows, places, weights: counted(rows, Routed(places, weights), None)
    )


def _products(
    x: torch.Tensor, matrices: ExpertMatrices, routed: Routed, activation: str, config: Tiling | None
) -> torch.Tensor:
    gate_up, down, gate_up_bias, down_bias, clamped_gate, spread, adapted = matrices
    w4, fp8 = isinstance(down, W4Rows | Fp4Rows), isinstance(down, QuantizedRows)
    if config is None and x.shape[0] <= MAX_TOKENS_BY_ROWS and not w4 and adapted is None:
        return _by_rows(x, matrices, routed, activation)
    (tokens, hidden), top, weight = x.shape, routed.ids.shape[1], _split(down)[0]
    outputs = _split(gate_up)[0].shape[1]
    experts, inner = len(weight), outputs if activation == "relu2" else outputs // 2
    itemsize = 1 if w4 else weight.element_size()
    groups = [part.group if isinstance(part, QuantizedRows) else 0 for part in (gate_up, down)]
    sizes = (tokens, top, experts if spread is None else experts * spread.ranks)
    chosen = config or (w4_config_for(*sizes) if w4 else config_for(*sizes, fp8, grouped=any(groups)))
    tiling = fitted(chosen, x.element_size(), itemsize, shared_bytes())
    if hidden * itemsize % 16 or inner * itemsize % 16:
        tiling = replace(tiling, described=False)  # which wants lines of whole 16 bytes
    order = None if routed.ranks is None else put_in_order(routed, experts, tiling.block_m)
    results, small = x.new_empty((tokens * top, hidden)), fp8 and tiling.small_rows
    if adapted is None:
        rows, between = quantize_rows(x, groups[0]) if small else x, x.new_empty((tokens * top, inner))
        gated = (activation, gate_up_bias, clamped_gate)
        product_tiles(rows, gate_up, routed, order, between, tiling, tiling.gate_up, *gated)
    else:  # what is added comes before the gate and before the weights, which are then launches of their own
        grouped, of_pairs = group_pairs(routed.ids, adapted.slots, adapted.gate_up), x.repeat_interleave(top, 0)
        weights, routed = routed.weights, routed._replace(weights=torch.ones_like(routed.weights))
        rows, both = quantize_rows(of_pairs, groups[0]) if small else of_pairs, x.new_empty((tokens * top, outputs))
        product_tiles(rows, gate_up, routed, order, both, tiling, tiling.gate_up, bias=gate_up_bias)
        lora_(both, of_pairs, adapted.gate_up, grouped)
        between = gated_mul(both, activation) if clamped_gate is None else clamped_mul(*clamped_gate, both)
    rows = quantize_rows(between, groups[1]) if small else between
    product_tiles(rows, down, routed, order, results, tiling, tiling.down, bias=down_bias)
    if adapted is not None:
        lora_(results, between, adapted.down, grouped)
        results *= weights.view(-1, 1)
    out = torch.empty_like(x)
    width = min(SUM_WIDTH, triton.next_power_of_2(hidden))
    device.sum_of_pairs[(tokens, triton.cdiv(hidden, width))](
        results, routed.ids, counters(x.device), out, hidden,
        TOP=top, BLOCK=width, EXPERTS=0 if order is None else triton.next_power_of_2(experts), num_warps=4,
        **overlap(tokens),
    )  # fmt: skip
    return out


def product_tiles(
    x: Matrices,  # [tokens, hidden], or, without an activation, [pairs, inner]
    matrices: Matrices,
    routed: Routed,
    order: Order | None,
    out: torch.Tensor,  # [pairs, inner], or [pairs, hidden]
    tiling: Tiling,
    cut: Cut,
    activation: str = "",
    bias: torch.Tensor | None = None,
    clamped_gate: tuple[float, float] | None = None,
) -> None:
    """Fills `out` with `activation(gate) * up`, or, without an activation, with weighted results."""
    (rows, row_scales, _), (weight, scales, zeros) = _split(x), _split(matrices)
    inputs, outputs, tokens = rows.shape[1], out.shape[1], routed.ids.shape[0]
    device.product_by_tiles[(_tiles(routed, order) * triton.cdiv(outputs, cut.block_n),)](
        rows, row_scales, _weight(weight, cut, tiling), scales, zeros, bias, routed.ids,
        None if activation else routed.weights, *(order or (None, None)), out, rows.stride(0), tokens, outputs,
        K=inputs, **_gate(activation, clamped_gate), **_in_groups(inputs, scales, zeros),
        **_constants(routed, tiling, cut),
    )  # fmt: skip


def _split(numbers: Matrices) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The values, the scales if they have 8 or 4 bits, and the zero points if they have 4; of floats, which have none,
    the scales again."""
    if isinstance(numbers, Fp4Rows):
        return numbers.words.view(torch.uint8), numbers.powers, numbers.powers
    if isinstance(numbers, W4Rows):
        return numbers.words.view(torch.uint8), numbers.scales, numbers.zeros
    return (*numbers, None) if isinstance(numbers, QuantizedRows) else (numbers, None, None)


def _groups(scales: torch.Tensor | None) -> int:
    return 1 if scales is None else scales.shape[-1]


def _in_groups(inputs: int, scales: torch.Tensor | None, zeros: torch.Tensor | None) -> dict[str, int]:
    """Sums have the scales of groups of 8-bit weights; those of 4 bits are scaled before."""
    return {"GROUPS": _groups(scales) if zeros is None else 1, "GROUP": inputs // _groups(scales)}


def _weight(matrices: torch.Tensor, cut: Cut, tiling: Tiling) -> torch.Tensor | TensorDescriptor:
    if not tiling.described:
        return matrices
    rows = matrices.view(-1, matrices.shape[2])
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [cut.block_n, cut.block_k])


def _tiles(routed: Routed, order: Order | None) -> int:
    return routed.ids.numel() if order is None else order.tiles.shape[0]


def _constants(routed: Routed, tiling: Tiling, cut: Cut) -> dict[str, Any]:
    tokens, top = routed.ids.shape
    return {
        "TOP": top,
        "BLOCK_S": triton.next_power_of_2(top),
        "BLOCK_P": triton.next_power_of_2(MAX_TOKENS_UNSORTED * top),
        "BLOCK_M": tiling.block_m,
        "SWAP": tiling.swap,
        "DESCRIBED": tiling.described,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
        **overlap(tokens),
    }


def _gate(activation: str, clamped: tuple[float, float] | None) -> dict[str, Any]:
    slope, limit = clamped or (0.0, 0.0)
    return {"ACTIVATION": "clamped" if clamped else activation, "SLOPE": slope, "LIMIT": limit}


def _by_rows(x: torch.Tensor, matrices: ExpertMatrices, routed: Routed, activation: str) -> torch.Tensor:
    gate_up, down, gate_up_bias, down_bias, clamped_gate, *_ = matrices
    between, out = x.new_empty((routed.ids.numel(), _split(down)[0].shape[2])), torch.empty_like(x)
    gate_up_rows(x, gate_up, routed, between, activation, GATE_UP_BY_ROWS, gate_up_bias, clamped_gate)
    down_rows(between, down, routed, out, DOWN_BY_ROWS, down_bias)
    return out


def gate_up_rows(
    x: torch.Tensor,
    gate_up: Matrices,
    routed: Routed,
    out: torch.Tensor,
    activation: str,
    cut: RowCut,
    bias: torch.Tensor | None = None,
    clamped_gate: tuple[float, float] | None = None,
) -> None:
    """Fills `out` [pairs, inner]."""
    hidden, (pairs, inner), (weight, scales, _) = x.shape[1], out.shape, _split(gate_up)
    piece = PIECE if scales is None else 2 * PIECE
    device.gate_up_by_rows[(triton.cdiv(inner, cut.block_n), pairs)](
        x, weight, scales, bias, routed.ids, out, x.stride(0), inner,
        TOP=routed.ids.shape[1], BLOCK_N=cut.block_n, **_gate(activation, clamped_gate),
        **_pieces(hidden, scales, piece), num_warps=cut.num_warps, **overlap(x.shape[0]),
    )  # fmt: skip


def down_rows(
    inner: torch.Tensor,
    down: Matrices,
    routed: Routed,
    out: torch.Tensor,
    cut: RowCut,
    bias: torch.Tensor | None = None,
) -> None:
    """Fills `out` [tokens, hidden]."""
    (tokens, hidden), (weight, scales, _) = out.shape, _split(down)
    device.down_by_rows[(triton.cdiv(hidden, cut.block_n), tokens)](
        inner, weight, scales, bias, routed.ids, routed.weights, out, hidden,
        TOP=routed.ids.shape[1], BLOCK_N=cut.block_n, **_pieces(inner.shape[1], scales, inner.shape[1]),
        num_warps=cut.num_warps, **overlap(tokens),
    )  # fmt: skip


def _pieces(inputs: int, scales: torch.Tensor | None, piece: int) -> dict[str, int]:
    """A row in pieces of that size, or in groups where these have scales."""
    width, groups = triton.next_power_of_2(inputs), _groups(scales)
    size = min(width, triton.next_power_of_2(piece) if groups == 1 else GROUP)
    return {"K": inputs, "GROUPS": groups, "PIECES": width // size, "PIECE": size}

"""Mixtures of experts in Triton: gate·up with its activation is one launch, down with the weights another.

For up to two tokens each reads its experts' rows for itself; for up to 16 tokens, tiles find their rows by themselves;
for more, pairs of token and expert are put in order first.
"""

# mypy: disable-error-code="import-untyped"
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from bough.core.model_config import MoEConfig
from bough.kernels.experts import device
from bough.kernels.experts.tiling import (
    DOWN_BY_ROWS,
    GATE_UP_BY_ROWS,
    MAX_TOKENS_BY_ROWS,
    MAX_TOKENS_UNSORTED,
    Cut,
    RowCut,
    Tiling,
    config_for,
    fitted,
)
from bough.kernels.ops import Norm
from bough.kernels.overlap import overlap
from bough.kernels.routing.triton import Order, Routed, counters, norm_route, put_in_order, route
from bough.kernels.shared_memory import shared_bytes
from bough.kernels.skinny_linear.tiling import power_of_two_above

SUM_WIDTH = 1024
PIECE = 256  # inputs that a warp reads at once: each then sums rows of its own


def routed_experts(
    x: torch.Tensor,  # [tokens, hidden]
    logits: torch.Tensor,  # [tokens, experts], the router's
    bias: torch.Tensor | None,
    moe: MoEConfig,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    scale: torch.Tensor | None = None,  # [experts], what their weights are multiplied with
) -> torch.Tensor:
    """The weighted sum of the experts that the logits choose for each row."""
    few = x.shape[0] <= MAX_TOKENS_UNSORTED
    x, routed = weighed(x, route(logits, moe, bias, count=not few), moe, scale)
    return multiply(x, gate_up, down, routed, activation)


def weighed(
    x: torch.Tensor, routed: Routed, moe: MoEConfig, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, Routed]:
    """What the experts multiply, and the choices with what they multiply their results with."""
    if scale is not None:
        routed = routed._replace(weights=routed.weights * scale[routed.ids])
    if moe.scales_inputs:
        x, routed = (x * routed.weights).to(x.dtype), routed._replace(weights=torch.ones_like(routed.weights))
    return x, routed


def normed_experts(
    x: torch.Tensor,  # [tokens, hidden], at most 512
    residual: torch.Tensor | None,
    norm: Norm,
    router: torch.Tensor,  # [experts, hidden], contiguous
    bias: torch.Tensor | None,
    moe: MoEConfig,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts' sum for the norm of x + residual, that norm, and x + residual, which is the next residual."""
    few = x.shape[0] <= MAX_TOKENS_UNSORTED
    routed, normed, stream = norm_route(x, residual, norm, router, bias, moe, count=not few)
    x, routed = weighed(normed, routed, moe)
    return multiply(x, gate_up, down, routed, activation), normed, stream


def multiply(
    x: torch.Tensor,
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden], contiguous: the gate's rows, then up's
    down: torch.Tensor,  # [experts, hidden, inner], contiguous
    routed: Routed,  # counted, unless there are few tokens
    activation: str,
    *,
    config: Tiling | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in float32."""
    if config is None and x.shape[0] <= MAX_TOKENS_BY_ROWS:
        return _by_rows(x, gate_up, down, routed, activation)
    (tokens, hidden), top, (experts, _, inner) = x.shape, routed.ids.shape[1], down.shape
    tiling = config or fitted(config_for(tokens, top, experts), x.element_size(), shared_bytes())
    if hidden * x.element_size() % 16 or inner * x.element_size() % 16:
        tiling = replace(tiling, described=False)  # which wants lines of whole 16 bytes
    order = None if routed.ranks is None else put_in_order(routed, experts, tiling.block_m)
    between, results = x.new_empty((tokens * top, inner)), x.new_empty((tokens * top, hidden))
    gate_up_tiles(x, gate_up, routed, order, between, activation, tiling)
    down_tiles(between, down, routed, order, results, tiling)
    out = torch.empty_like(x)
    width = min(SUM_WIDTH, power_of_two_above(hidden))
    device.sum_of_pairs[(tokens, triton.cdiv(hidden, width))](
        results, counters(x.device), out, hidden,
        TOP=top, BLOCK=width, EXPERTS=0 if order is None else power_of_two_above(experts), num_warps=4,
        **overlap(tokens),
    )  # fmt: skip
    return out


def gate_up_tiles(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    routed: Routed,
    order: Order | None,
    out: torch.Tensor,  # [pairs, inner]
    activation: str,
    tiling: Tiling,
) -> None:
    """Fills `out`."""
    (tokens, hidden), inner, cut = x.shape, out.shape[1], tiling.gate_up
    device.gate_up_by_tiles[(_tiles(routed, order) * triton.cdiv(inner, cut.block_n),)](
        x, _weight(gate_up, cut, tiling), routed.ids, *(order or (None, None)), out, x.stride(0), tokens, inner,
        K=hidden, ACTIVATION=activation, **_constants(routed, tiling, cut),
    )  # fmt: skip


def down_tiles(
    inner: torch.Tensor,  # [pairs, inner]
    down: torch.Tensor,
    routed: Routed,
    order: Order | None,
    out: torch.Tensor,  # [pairs, hidden]
    tiling: Tiling,
) -> None:
    """Fills `out` with weighted results."""
    hidden, cut = out.shape[1], tiling.down
    device.down_by_tiles[(_tiles(routed, order) * triton.cdiv(hidden, cut.block_n),)](
        inner, _weight(down, cut, tiling), routed.ids, routed.weights, *(order or (None, None)), out,
        routed.ids.shape[0], hidden,
        K=inner.shape[1], **_constants(routed, tiling, cut),
    )  # fmt: skip


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
        "BLOCK_S": power_of_two_above(top),
        "BLOCK_P": power_of_two_above(MAX_TOKENS_UNSORTED * top),
        "BLOCK_M": tiling.block_m,
        "SWAP": tiling.swap,
        "DESCRIBED": tiling.described,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
        **overlap(tokens),
    }


def _by_rows(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routed: Routed, activation: str
) -> torch.Tensor:
    between, out = x.new_empty((routed.ids.numel(), down.shape[2])), torch.empty_like(x)
    gate_up_rows(x, gate_up, routed, between, activation, GATE_UP_BY_ROWS)
    down_rows(between, down, routed, out, DOWN_BY_ROWS)
    return out


def gate_up_rows(
    x: torch.Tensor, gate_up: torch.Tensor, routed: Routed, out: torch.Tensor, activation: str, cut: RowCut
) -> None:
    """Fills `out` [pairs, inner]."""
    hidden, (pairs, inner) = x.shape[1], out.shape
    width = power_of_two_above(hidden)
    piece = min(width, PIECE)
    device.gate_up_by_rows[(triton.cdiv(inner, cut.block_n), pairs)](
        x, gate_up, routed.ids, out, x.stride(0), inner,
        K=hidden, TOP=routed.ids.shape[1], ACTIVATION=activation, BLOCK_N=cut.block_n, PIECES=width // piece,
        PIECE=piece, num_warps=cut.num_warps, **overlap(x.shape[0]),
    )  # fmt: skip


def down_rows(inner: torch.Tensor, down: torch.Tensor, routed: Routed, out: torch.Tensor, cut: RowCut) -> None:
    """Fills `out` [tokens, hidden]."""
    tokens, hidden = out.shape
    device.down_by_rows[(triton.cdiv(hidden, cut.block_n), tokens)](
        inner, down, routed.ids, routed.weights, out, hidden,
        K=inner.shape[1], TOP=routed.ids.shape[1], BLOCK_N=cut.block_n, BLOCK_K=power_of_two_above(inner.shape[1]),
        num_warps=cut.num_warps, **overlap(tokens),
    )  # fmt: skip

"""Mixtures of experts in plain torch: one expert after the other, each with the tokens that were sent to it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bough.kernels.activation.reference import gated_mul
from bough.kernels.experts import fp4
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.lora.reference import PairAdapters, group_pairs, lora_
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.w4_linear.reference import W4Rows, dequantize

Matrices = torch.Tensor | QuantizedRows | W4Rows | Fp4Rows  # of experts: [experts, outputs, inputs]


# Rows, the places of their experts among the matrices (-1: they are not here) and their weights: the weighted sums.
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Chosen(list[torch.Tensor]):
    """The experts of a step's tokens, layer by layer: [tokens, per_token]. They are kept while somebody asks for them,
    so that captured graphs do without."""

    asked = False

    def keep(self, ids: torch.Tensor) -> None:
        """Copies them: where they lie, places may be written."""
        if self.asked:
            self.append(ids.clone())


class Spread(NamedTuple):
    """Experts that are spread over ranks: from those that a router chooses to the places of their matrices."""

    places: torch.Tensor  # [experts, most copies] int32: of each copy; -1: it is on another rank
    copies: torch.Tensor  # [experts] int32: a token takes that of its number in the step
    ranks: int  # that have as many matrices each
    loads: torch.Tensor | None = None  # [experts] int64: how often each was chosen
    # Where tokens go to the ranks that have their experts, which then have places of all ranks: what sends them there.
    dispatch: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Multiply], torch.Tensor] | None = None
    chosen: Chosen | None = None  # gets the ids of each layer, where requests may ask for them


def find_places(ids: torch.Tensor, spread: Spread) -> torch.Tensor:
    """[tokens, per_token] int32, like the ids; counts the loads, and keeps the ids."""
    if spread.chosen is not None:
        spread.chosen.keep(ids)
    if spread.loads is not None:
        spread.loads.add_(torch.bincount(ids.flatten(), minlength=len(spread.loads)))
    token = torch.arange(len(ids), device=ids.device)[:, None]
    return spread.places[ids, token % spread.copies[ids]]


def experts(
    x: torch.Tensor,  # [tokens, hidden]
    gate_up: Matrices,  # [experts, 2 * inner, hidden]: the gate's rows, then up's
    down: Matrices,  # [experts, hidden, inner]
    ids: torch.Tensor,  # [tokens, per_token] int32, all different within a token; -1: the expert is not here
    weights: torch.Tensor,  # [tokens, per_token] float32
    activation: str,
    gate_up_bias: torch.Tensor | None = None,  # [experts, 2 * inner]
    down_bias: torch.Tensor | None = None,  # [experts, hidden]
    clamped_gate: tuple[float, float] | None = None,
    adapted: PairAdapters | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in the type of the weights."""
    gate = partial(clamped_mul, *clamped_gate) if clamped_gate else partial(gated_mul, activation=activation)
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in set(ids.flatten().tolist()) - {-1}:
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        rows = x[tokens]
        inner = F.linear(rows, _matrix(gate_up, expert, x), biases[0])
        if adapted is not None:
            grouped = group_pairs(ids[tokens, slots, None], adapted.slots[tokens], adapted.gate_up)
            lora_(inner, rows, adapted.gate_up, grouped)
        inner = gate(inner)
        result = F.linear(inner, _matrix(down, expert, inner), biases[1])
        if adapted is not None:
            lora_(result, inner, adapted.down, grouped)
        out.index_add_(0, tokens, result.to(weights.dtype) * weights[tokens, slots, None])
    return out.to(x.dtype)


def _matrix(matrices: Matrices, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """That of one expert, as those rows take it."""
    if isinstance(matrices, QuantizedRows):
        return QuantizedRows(*(part[expert] for part in matrices)).dequantize().to(rows.dtype)
    if isinstance(matrices, W4Rows):
        return dequantize(W4Rows(*(part[expert] for part in matrices)), rows.shape[1], rows.dtype)
    if isinstance(matrices, Fp4Rows):
        return fp4.dequantize(Fp4Rows(*(part[expert] for part in matrices)), rows.shape[1]).to(rows.dtype)
    return matrices[expert]


def clamped_mul(slope: float, limit: float, gate_up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's gate: `gate * sigmoid(slope * gate) * (up + 1)`, both kept within the limit."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate * slope) * (up.clamp(-limit, limit) + 1)

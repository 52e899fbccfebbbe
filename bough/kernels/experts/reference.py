"""Mixtures of experts in plain torch: one expert after the other, each with the tokens that were sent to it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from bough.kernels.activation.reference import gelu_tanh_mul, silu_mul
from bough.kernels.experts import fp4
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.w4_linear.reference import W4Rows, dequantize

Matrices = torch.Tensor | QuantizedRows | W4Rows | Fp4Rows  # of experts: [experts, outputs, inputs]


def experts(
    x: torch.Tensor,  # [tokens, hidden]
    gate_up: Matrices,  # [experts, 2 * inner, hidden]: the gate's rows, then up's
    down: Matrices,  # [experts, hidden, inner]
    ids: torch.Tensor,  # [tokens, per_token] int32, all different within a token
    weights: torch.Tensor,  # [tokens, per_token] float32
    activation: str,
    gate_up_bias: torch.Tensor | None = None,  # [experts, 2 * inner]
    down_bias: torch.Tensor | None = None,  # [experts, hidden]
    clamped_gate: tuple[float, float] | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, summed in the type of the weights."""
    gate = silu_mul if activation == "silu" else gelu_tanh_mul
    if clamped_gate is not None:
        gate = partial(clamped_mul, *clamped_gate)
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in set(ids.flatten().tolist()):
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        inner = gate(F.linear(x[tokens], _matrix(gate_up, expert, x), biases[0]))
        result = F.linear(inner, _matrix(down, expert, inner), biases[1]).to(weights.dtype)
        out.index_add_(0, tokens, result * weights[tokens, slots, None])
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

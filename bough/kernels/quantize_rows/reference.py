"""Quantising rows in plain torch, composed of the plain operations."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bough.kernels.activation.reference import gelu_tanh_mul, silu_mul
from bough.kernels.rms_norm.reference import rms_norm

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SMALLEST_AMAX = 1e-12  # rows of zeros keep a scale that can be divided by


class QuantizedRows(NamedTuple):
    """`values * scales` is what the rows were, but for the rounding. Activations have a row for each token, weights one
    for each output."""

    values: torch.Tensor  # [rows, size] float8_e4m3fn, contiguous
    scales: torch.Tensor  # [rows, 1] float32


ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def quantize_rows(
    x: torch.Tensor,  # [rows, size]
) -> QuantizedRows:
    """Each row is divided by what makes its largest value the largest 8-bit one. NaN stays NaN."""
    wide = x.float()
    amax = wide.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST_AMAX)
    values = (wide * (LARGEST / amax)).clamp_(-LARGEST, LARGEST).to(FP8)
    return QuantizedRows(values, amax * (1.0 / LARGEST))


def norm_quantize_rows(
    x: torch.Tensor,  # [rows, size]
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # like x
    plus_one: bool = False,
) -> tuple[QuantizedRows, torch.Tensor]:
    """The RMS norm of x + residual, quantised, and that sum, which is the next residual."""
    normed, stream = rms_norm(x, weight, eps, residual, plus_one)
    return quantize_rows(normed), stream


def gated_quantize_rows(
    x: torch.Tensor,  # [rows, 2 * size]: gate | up
    activation: str,  # "silu" or "gelu_tanh"
) -> QuantizedRows:
    """`activation(gate) * up`, quantised."""
    return quantize_rows(ACTIVATIONS[activation](x))

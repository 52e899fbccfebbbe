"""Quantising rows in plain torch, composed of the plain operations."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from bough.kernels.activation.reference import gated_mul
from bough.kernels.rms_norm.reference import rms_norm

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SMALLEST_AMAX = 1e-12  # rows of zeros keep a scale that can be divided by
GROUP = 128  # values that share a scale where a row has several


class QuantizedRows(NamedTuple):
    """`values * scales` is what the rows were, but for the rounding. Activations have a row for each token, weights one
    for each output; the weights of experts have a side more in front. A scale is that of the row or of 128 values, of
    fewer at its end."""

    values: torch.Tensor  # [rows, size] float8_e4m3fn, or int8 where a head has integers; contiguous
    scales: torch.Tensor  # [rows, 1] or [rows, groups] float32, contiguous

    @property
    def group(self) -> int:
        """Values that share a scale; 0: all of a row."""
        return GROUP if self.scales.shape[-1] > 1 else 0

    def dequantize(self) -> torch.Tensor:
        """What the rows were, in float32."""
        if not self.group:
            return self.values.float() * self.scales
        return self.values.float() * self.scales.repeat_interleave(GROUP, dim=-1)[..., : self.values.shape[-1]]


def empty_rows(*shape: int, group: int, device: torch.device) -> QuantizedRows:
    """Memory for rows, not yet written."""
    groups = -(-shape[-1] // group) if group else 1
    return QuantizedRows(
        torch.empty(shape, dtype=FP8, device=device),
        torch.empty((*shape[:-1], groups), dtype=torch.float32, device=device),
    )


def quantize_rows(
    x: torch.Tensor,  # [rows, size]
    group: int = 0,  # values that share a scale; 0: all of a row
) -> QuantizedRows:
    """Each row, or group, is divided by what makes its largest value the largest 8-bit one. NaN stays NaN."""
    wide = x.float()
    if group:
        padded = F.pad(wide, (0, -x.shape[1] % group))
        values, scales = quantize_rows(padded.view(-1, group))
        return QuantizedRows(values.view(padded.shape)[:, : x.shape[1]].contiguous(), scales.view(len(x), -1))
    amax = wide.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST_AMAX)
    values = (wide * (LARGEST / amax)).clamp_(-LARGEST, LARGEST).to(FP8)
    return QuantizedRows(values, amax * (1.0 / LARGEST))


def norm_quantize_rows(
    x: torch.Tensor,  # [rows, size]
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # like x
    plus_one: bool = False,
    group: int = 0,
) -> tuple[QuantizedRows, torch.Tensor]:
    """The RMS norm of x + residual, quantised, and that sum, which is the next residual."""
    normed, stream = rms_norm(x, weight, eps, residual, plus_one)
    return quantize_rows(normed, group), stream


def gated_quantize_rows(
    x: torch.Tensor,  # [rows, 2 * size]: gate | up
    activation: str,  # "silu" or "gelu_tanh"
    group: int = 0,
) -> QuantizedRows:
    """`activation(gate) * up`, quantised."""
    return quantize_rows(gated_mul(x, activation), group)

"""What quantised rows are: the result of this operation, and what a scaled product takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SMALLEST_AMAX = 1e-12  # rows of zeros keep a scale that can be divided by


class QuantizedRows(NamedTuple):
    """`values * scales` is what the rows were, but for the rounding. Activations have a row for each token, weights one
    for each output."""

    values: torch.Tensor  # [rows, size] float8_e4m3fn, contiguous
    scales: torch.Tensor  # [rows, 1] float32

"""What a weight of 4 bits is, how its integers are packed, and its product in plain torch.

A word has eight inputs that stand 16 apart, so that neighbouring words meet neighbouring inputs whatever nibble is
taken: word `w` of a row holds, in nibble `j`, input `128 * (w // 16) + 16 * j + w % 16`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

BLOCK = 128  # inputs; rows are padded to a multiple
PLANES = 8  # nibbles of a word
LANES = BLOCK // PLANES
GROUPS = (32, 64)  # and all multiples of a block


class IntegerRows(NamedTuple):
    """Rows as checkpoints have them: `(codes - zeros) * scales` are the values."""

    codes: torch.Tensor  # [rows, inputs] uint8
    scales: torch.Tensor  # [rows, groups] float32
    zeros: torch.Tensor  # [rows, groups] uint8


class W4Rows(NamedTuple):
    """Packed rows of a weight."""

    words: torch.Tensor  # [rows, inputs / 8, padded] int32
    scales: torch.Tensor  # [rows, groups] float16
    zeros: torch.Tensor  # [rows, groups] uint8


def fits(inputs: int, group: int) -> bool:
    """Whether there is a product for groups of this size."""
    return inputs % group == 0 and (group in GROUPS or group % BLOCK == 0)


def words_of(inputs: int) -> int:
    """The words of a row."""
    return -(-inputs // BLOCK) * LANES


def pack(rows: IntegerRows) -> W4Rows:
    count, inputs = rows.codes.shape
    padded = F.pad(rows.codes, (0, -inputs % BLOCK)).view(count, -1, PLANES, LANES).int()
    words = padded[:, :, 0]
    for plane in range(1, PLANES):
        words = words | padded[:, :, plane] << 4 * plane
    return W4Rows(words.flatten(1), rows.scales.half(), rows.zeros)


def dequantize(weight: W4Rows, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The values that the packed rows stand for. [rows, inputs]"""
    count, groups = weight.scales.shape
    words = weight.words.view(count, -1, 1, LANES)
    shifts = torch.arange(0, 4 * PLANES, 4, dtype=torch.int32, device=words.device)[:, None]
    codes = ((words >> shifts) & 15).flatten(1)[:, :inputs].reshape(count, groups, -1)
    values = (codes - weight.zeros.int()[:, :, None]) * weight.scales.float()[:, :, None]
    return values.view(count, inputs).to(dtype)


def w4_linear(
    x: torch.Tensor,  # [rows, in]
    weight: W4Rows,  # of [out, in]
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:
    """`x @ weight.T + bias`."""
    return F.linear(x, dequantize(weight, x.shape[1], x.dtype), bias)

"""What a weight of 4 bits is, how its integers are packed, and its product in plain torch.

Byte `b` of a block of 128 inputs holds input `b` in its lower nibble and input `64 + b` in its upper one, so that the
lower nibbles of neighbouring bytes meet neighbouring inputs, and so do the upper ones.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

BLOCK = 128  # inputs; rows are padded to a multiple
HALF = BLOCK // 2  # bytes of a block
GROUPS = (32, 64)  # and all multiples of a block


class IntegerRows(NamedTuple):
    """Rows as checkpoints have them: `(codes - zeros) * scales` are the values."""

    codes: torch.Tensor  # [rows, inputs] uint8
    scales: torch.Tensor  # [rows, groups] float32
    zeros: torch.Tensor  # [rows, groups] uint8


class W4Rows(NamedTuple):
    """Packed rows of a weight."""

    words: torch.Tensor  # [rows, inputs / 8, padded] int32: four bytes each
    scales: torch.Tensor  # [rows, groups] float16
    zeros: torch.Tensor  # [rows, groups] uint8


def fits(inputs: int, group: int) -> bool:
    """Whether there is a product for groups of this size."""
    return inputs % group == 0 and (group in GROUPS or group % BLOCK == 0)


def group_for(inputs: int) -> int | None:
    """The group in which a weight of so many inputs is quantised here; None: it has no product."""
    return next((group for group in (BLOCK, *reversed(GROUPS)) if inputs % group == 0), None)


def quantize(values: torch.Tensor, group: int) -> IntegerRows:
    """Rounds rows [rows, inputs] to 16 steps between the least and the greatest value of each group, and zero."""
    grouped = values.float().view(len(values), -1, group)
    least, greatest = grouped.amin(2).clamp(max=0.0), grouped.amax(2).clamp(min=0.0)
    scales = ((greatest - least) / 15).clamp(min=torch.finfo(torch.float16).tiny).half().float()
    zeros = (-least / scales).round().clamp(0, 15)
    codes = (grouped / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    return IntegerRows(codes.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8))


def words_of(inputs: int) -> int:
    """The words of a row."""
    return -(-inputs // BLOCK) * HALF // 4


def pack(rows: IntegerRows) -> W4Rows:
    return W4Rows(pack_codes(rows.codes), rows.scales.half(), rows.zeros)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """The words of rows of nibbles [rows, inputs]."""
    count, inputs = codes.shape
    halves = F.pad(codes, (0, -inputs % BLOCK)).view(count, -1, 2, HALF)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).view(torch.int32)


def codes_of(words: torch.Tensor, inputs: int) -> torch.Tensor:
    """The nibbles that were packed. [rows, inputs] int32"""
    packed = words.view(torch.uint8).view(len(words), -1, HALF)
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)[:, :inputs].int()


def dequantize(weight: W4Rows, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The values that the packed rows stand for. [rows, inputs]"""
    count, groups = weight.scales.shape
    codes = codes_of(weight.words, inputs).reshape(count, groups, -1)
    values = (codes - weight.zeros.int()[:, :, None]) * weight.scales.float()[:, :, None]
    return values.view(count, inputs).to(dtype)


def w4_linear(
    x: torch.Tensor,  # [rows, in]
    weight: W4Rows,  # of [out, in]
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:
    """`x @ weight.T + bias`."""
    return F.linear(x, dequantize(weight, x.shape[1], x.dtype), bias)

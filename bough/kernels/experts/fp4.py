"""Experts of 4-bit floats (E2M1) with a power of two for every 32 inputs, as MXFP4 checkpoints have them: what the
numbers are, how they are packed for kernels, and what they stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
GROUP = 32  # inputs that share a power
POWER_BIAS = 127


class Fp4Rows(NamedTuple):
    """Rows as checkpoints have them."""

    codes: torch.Tensor  # [rows, inputs / 2] uint8, of each byte the lower half first
    powers: torch.Tensor  # [rows, inputs / 32] uint8


def fits(inputs: int) -> bool:
    """Whether rows of this length can be packed."""
    return inputs % (2 * GROUP) == 0


def pack(codes: torch.Tensor) -> torch.Tensor:
    """The codes of rows in the order that kernels read: bytes with the halves of two neighbouring groups."""
    halves = torch.stack([codes & 15, codes >> 4], dim=-1).view(len(codes), -1, 2, GROUP)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def dequantize(packed: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """The numbers of packed rows. float32 [rows, inputs]"""
    pairs = packed.view(len(packed), -1, GROUP)
    values = VALUES.to(packed.device)[torch.stack([pairs & 15, pairs >> 4], dim=2).int()].flatten(1, 2)
    return (values * powers_of_two(powers)[:, :, None]).flatten(1)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """What bytes stand for. float32"""
    return torch.exp2(exponents.float() - POWER_BIAS)

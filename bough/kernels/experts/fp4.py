"""Experts of 4-bit floats (E2M1) with a power of two for every 32 inputs, as MXFP4 checkpoints have them."""

from typing import NamedTuple

import torch

from bough.kernels.w4_linear.reference import codes_of, pack_codes

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
GROUP = 32  # inputs that share a power
POWER_BIAS = 127


class FloatRows(NamedTuple):
    """Rows as checkpoints have them."""

    codes: torch.Tensor  # [rows, inputs] uint8
    powers: torch.Tensor  # [rows, inputs / 32] uint8


class Fp4Rows(NamedTuple):
    """Packed rows of a weight."""

    words: torch.Tensor  # as those of `W4Rows`
    powers: torch.Tensor  # [rows, inputs / 32] uint8


def pack(rows: FloatRows) -> Fp4Rows:
    return Fp4Rows(pack_codes(rows.codes), rows.powers)


def dequantize(weight: Fp4Rows, inputs: int) -> torch.Tensor:
    """The numbers that packed rows stand for. float32 [rows, inputs]"""
    values = VALUES.to(weight.words.device)[codes_of(weight.words, inputs)]
    return (values.view(len(values), -1, GROUP) * powers_of_two(weight.powers)[:, :, None]).flatten(1)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """What bytes stand for. float32"""
    return torch.exp2(exponents.float() - POWER_BIAS)

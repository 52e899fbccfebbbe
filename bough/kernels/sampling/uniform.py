"""Random numbers on tensors, as a function of (seed, output position).

`bough.core.seeds` holds the constants and says why there is no generator with a state; this is the same mix in torch,
`triton_tools.uniform` the same again inside a kernel. All three agree to the last bit.
"""

from __future__ import annotations

from torch import Tensor

from bough.core.seeds import GOLDEN_GAMMA, MIX_LAST_SHIFT, MIX_STEPS, as_int64

UNIFORM_BITS = 52  # one fewer than a double holds: u * total then rounds below total


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Random numbers in [0, 1), one for each pair of int64 seed and position. [n] float64"""
    gamma = as_int64(GOLDEN_GAMMA)
    bits = _mix64(_mix64(seeds) + (positions + 1) * gamma)
    return _shift_right(bits, 64 - UNIFORM_BITS).double() * 2.0**-UNIFORM_BITS


def _mix64(values: Tensor) -> Tensor:
    """`bough.core.seeds.mix64` on int64 tensors, whose products wrap around as those of unsigned integers do."""
    for shift, multiplier in MIX_STEPS:
        values = (values ^ _shift_right(values, shift)) * as_int64(multiplier)
    return values ^ _shift_right(values, MIX_LAST_SHIFT)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """A shift that brings in zeros; that of signed integers brings in copies of the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)

"""What the sampling kernels know of rows, and the random numbers of (seed, output position) as tensors.

The tensors have one entry for each row that can ever run; a batch names its rows by number. The random numbers agree to
the last bit with `bough.core.seeds` and with `device.uniform`.
"""

from dataclasses import dataclass

from torch import Tensor

from bough.core.seeds import GOLDEN_GAMMA, MIX_LAST_SHIFT, MIX_STEPS, as_int64

MAX_VOCAB_SIZE = 2**19


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Sampling parameters by row number, on the device. [rows] each"""

    random: Tensor  # bool: draws a random number; otherwise it takes the best token and only `generated` matters
    temperature: Tensor  # float32
    top_k: Tensor  # int64; the vocabulary's size or more: off
    top_p: Tensor  # float64; 1: off
    min_p: Tensor  # float32; 0: off
    seed: Tensor  # int64
    generated: Tensor  # int64, output position of the next token; sampling adds one


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

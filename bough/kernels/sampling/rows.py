"""What the sampling kernels are told of rows, and the limits both implementations agree on.

The tensors belong to the caller; they hold one entry for each row that can ever run, and a batch names its rows by
number, so that a step brings nothing but those numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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

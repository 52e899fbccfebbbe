"""What a packed weight is, and which of GGUF's types can be packed how.

The layout of the bytes is described in `bough/native/src/linear_tile.h`; it is the same for every CPU. Packing itself
is done by `native`: nobody needs packed weights without the compiled library.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

TILE_ROWS = 16
GROUP = 32
LINE = 64  # bytes: what four inputs of 16 rows take at 8 bits each; also the alignment of a blob


class Format(IntEnum):
    """How a weight is kept; the numbers of `enum bough_format`."""

    F32 = 0
    Q4 = 1
    Q4_MIN = 2
    Q8 = 3
    Q8_MIN = 4
    Q8_HALF = 5
    BF16 = 6
    F16 = 7

    @property
    def is_float(self) -> bool:
        return self in (Format.F32, Format.BF16, Format.F16)

    @property
    def has_nibbles(self) -> bool:
        return self in (Format.Q4, Format.Q4_MIN)

    @property
    def has_offsets(self) -> bool:
        return self in (Format.Q4_MIN, Format.Q8_MIN)

    @property
    def scales_per_group(self) -> int:
        return 2 if self is Format.Q8_HALF else 1


def packed_bytes(form: Format, outputs: int, inputs: int) -> int:
    """What a weight takes, in whole tiles of rows."""
    if form.is_float:
        tile = inputs * TILE_ROWS * (4 if form is Format.F32 else 2)
    else:
        numbers = form.scales_per_group + (1 if form.has_offsets else 0)
        tile = inputs // GROUP * TILE_ROWS * (GROUP // 2 if form.has_nibbles else GROUP) + (
            inputs // GROUP * TILE_ROWS * 2 * numbers
        )
        tile = -(-tile // LINE) * LINE
    return -(-outputs // TILE_ROWS) * tile


FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
NATURAL: dict[GGMLQuantizationType, Format] = {
    GGMLQuantizationType.F32: Format.F32,
    GGMLQuantizationType.F16: Format.F16,
    GGMLQuantizationType.BF16: Format.BF16,
    GGMLQuantizationType.Q4_0: Format.Q4,
    GGMLQuantizationType.Q4_1: Format.Q4_MIN,
    GGMLQuantizationType.Q4_K: Format.Q4_MIN,
    GGMLQuantizationType.Q5_0: Format.Q8,
    GGMLQuantizationType.Q8_0: Format.Q8,
    GGMLQuantizationType.Q5_1: Format.Q8_MIN,
    GGMLQuantizationType.Q5_K: Format.Q8_MIN,
    GGMLQuantizationType.Q6_K: Format.Q8_HALF,
}
"""The format that keeps a type as it is. A type that is not here must be dequantised before it is packed."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The rows of a weight, quantised and in tiles; `blob` may lie in a file that is mapped."""

    format: Format
    n: int  # outputs
    k: int  # inputs
    blob: npt.NDArray[np.uint8]


def aligned_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Memory that begins at a line of the cache, not initialised."""
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size]

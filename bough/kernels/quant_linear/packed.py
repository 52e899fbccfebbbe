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

    @property
    def has_nibbles(self) -> bool:
        return self in (Format.Q4, Format.Q4_MIN)

    @property
    def has_offsets(self) -> bool:
        return self in (Format.Q4_MIN, Format.Q8_MIN)

    @property
    def scales_per_group(self) -> int:
        return 2 if self is Format.Q8_HALF else 1


FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
NATURAL: dict[GGMLQuantizationType, Format] = {
    **dict.fromkeys(FLOATS, Format.F32),
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

"""What Triton's interpreter gets wrong, put right: loop bounds that a kernel has loaded, and 8-bit floats.

The interpreter of triton 3.6 makes an int of a one-element array, which numpy 2.4 refuses, and cuts numbers off where a
GPU rounds them to 8 bits. Importing this module gives it the conversions of numpy and torch. On a GPU nothing is
interpreted and nothing changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_TYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
INTERPRETED_PROGRAMS = 8  # of decode attention: those that find nothing to do cost a device nothing, and us the most
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_patch = interpreter._patch_lang_tensor
_convert = interpreter._convert_float


def _patch_with_index(tensor: type[tl.tensor], scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _convert_float(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
    """The bits of the values in the other type."""
    if 8 not in (source.primitive_bitwidth, target.primitive_bitwidth):
        bits: np.ndarray = _convert(values, source, target, rounding)
        return bits
    raw = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=np.uint8).copy())
    converted = raw.view(TORCH_TYPES[source]).to(TORCH_TYPES[target])
    return converted.view(BYTES[converted.element_size()]).view(values.shape).numpy()


interpreter._patch_lang_tensor = _patch_with_index
interpreter._convert_float = _convert_float

"""What Triton's interpreter gets wrong, put right: loop bounds that a kernel has loaded, and 8-bit floats. And what it
does again and again, done once.

The interpreter of triton 3.6 makes an int of a one-element array, which numpy 2.4 refuses, and cuts numbers off where a
GPU rounds them to 8 bits. Importing this module gives it the conversions of numpy and torch. Each time one function of
a kernel calls another, it looks through the whole language for what to replace, which takes longer than the functions
do; and each value gets a description of its shape of its own, though there are few shapes. On a GPU nothing is
interpreted and nothing changes.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
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

# The parts of the language whose functions a launch replaces.
BUILTINS = {
    part: [name for name, member in inspect.getmembers(part) if tl.core.is_builtin(member)]
    for part in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
}

_patch_all = interpreter._patch_lang
_patch = interpreter._patch_lang_tensor
_convert = interpreter._convert_float
_numpy_type = cache(interpreter._get_np_dtype)


def _patch_lang(fn: Any) -> Any:
    """Nothing is left to do for a function that a running kernel calls."""
    parts = [part for part in fn.__globals__.values() if part is tl or part is tl.core]
    if not any(tl.core.is_builtin(part.load) for part in parts):
        return interpreter._LangPatchScope()
    return _patch_all(fn)


def _patch_builtin(part: Any, builder: Any, scope: Any) -> None:
    for name in BUILTINS[part]:
        if tl.core.is_builtin(member := getattr(part, name)):
            interpreter._patch_attr(part, name, member, builder, scope)


def _get_np_dtype(kind: tl.dtype) -> np.dtype:
    return np.dtype(np.uint64) if isinstance(kind.scalar, tl.pointer_type) else _numpy_type(kind.scalar)


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


@cache
def _block_of(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
    """What Triton's own constructor makes of a shape."""
    made: Any = object.__new__(tl.block_type)
    _init_block(made, tl.int32, list(sizes))
    return made.shape, made.numel, f"<{made.shape}"


def _init_block_once(self: Any, element_ty: tl.dtype, shape: Any) -> None:
    self.element_ty = element_ty
    sizes = (size.value if isinstance(size, tl.constexpr) else size for size in shape)
    self.shape, self.numel, name = _block_of(tuple(sizes))
    self.name = f"{name}, {element_ty}>"


@cache
def _tensor_of(sizes: tuple[int, ...]) -> tuple[Any, tl.constexpr]:
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _init_tensor_once(self: Any, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_of(tuple(type.shape) if type.is_block() else ())


_init_block = tl.block_type.__init__
tl.block_type.__init__ = _init_block_once
tl.tensor.__init__ = _init_tensor_once
interpreter._patch_lang = _patch_lang
interpreter._patch_builtin = _patch_builtin
interpreter._patch_lang_tensor = _patch_with_index
interpreter._convert_float = _convert_float
interpreter._get_np_dtype = _get_np_dtype

"""Packing and the product in the compiled library, with the signatures of the reference.

Models do not come through here at each step (a tape of operations calls the library's own functions); this is for
packing at load, for tests and for measurements.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from bough.kernels.quant_linear.packed import Format, PackedWeight, aligned_bytes
from bough.native.library import load_library
from bough.native.tape import ThreadPool

Pointer, Size = ctypes.c_void_p, ctypes.c_int64


class WeightStruct(ctypes.Structure):
    """`bough_weight` of linear.h."""

    _fields_ = (("format", Size), ("n", Size), ("k", Size), ("blob", Pointer))


def pack(
    rows: npt.NDArray[np.uint8],  # [n, bytes of a row], as the file holds them
    source: GGMLQuantizationType,
    k: int,
    form: Format,
) -> PackedWeight:
    """Puts rows into tiles. Floats can be packed as F32, Q8 and Q4_MIN, every type in its natural format and as F32."""
    library, n = linear_library(), len(rows)
    size = library.bough_weight_bytes(form, n, k)
    blob = aligned_bytes(size)
    stored = np.ascontiguousarray(rows)
    if not size or library.bough_weight_pack(form, source, n, k, stored.ctypes.data, blob.ctypes.data, 0, n):
        raise ValueError(f"{source.name} rows of {k} inputs cannot be packed as {form.name}.")
    return PackedWeight(form, n, k, blob)


def quant_linear(
    x: torch.Tensor,  # [tokens, in] float32
    parts: Sequence[PackedWeight],  # whose outputs stand side by side
    bias: torch.Tensor | None = None,  # [out]
    *,
    out: torch.Tensor | None = None,  # [tokens, out]
    prompt: bool = False,  # the tokens are of a prompt
    accumulate: bool = False,
    pool: ThreadPool | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, written to `out` if given, or added to what is there."""
    library, pool = linear_library(), pool or _one_thread()
    structs = structs_of(parts)
    if out is None:
        out = torch.empty(len(x), sum(part.n for part in parts))
    scratch = aligned_bytes(library.bough_linear_scratch(structs, len(parts), len(x), pool.threads))
    library.bough_linear_alone(
        pool.handle,
        structs,
        len(parts),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        None if bias is None else bias.data_ptr(),
        len(x),
        prompt,
        accumulate,
        scratch.ctypes.data,
    )
    return out


def dequantize_row(weight: PackedWeight, row: int) -> torch.Tensor:
    """The values of one row. [k] float32"""
    values = torch.empty(weight.k)
    linear_library().bough_weight_row(structs_of([weight]), row, values.data_ptr())
    return values


def variant(form: Format, *, prompt: bool = False) -> str:
    """The name of the variant that this CPU gets for tokens, of a prompt or not."""
    name: bytes = linear_library().bough_linear_variant(form, prompt)
    return name.decode()


def structs_of(parts: Sequence[PackedWeight]) -> ctypes.Array[WeightStruct]:
    """The parts as the library takes them; they must outlive the result."""
    made = [WeightStruct(part.format, part.n, part.k, part.blob.ctypes.data) for part in parts]
    return (WeightStruct * len(made))(*made)


@functools.cache
def _one_thread() -> ThreadPool:
    return ThreadPool(linear_library(), 1)


@functools.cache
def linear_library() -> ctypes.CDLL:
    """The library, with the signatures of linear.h declared."""
    library = load_library()
    if library is None:
        raise RuntimeError("The CPU kernels are not compiled; run `bough build-kernels`.")
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    """Tells ctypes the signatures of linear.h."""
    integer = ctypes.c_int
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "bough_weight_bytes": (ctypes.c_size_t, [integer, Size, Size]),
        "bough_weight_pack": (integer, [integer, integer, Size, Size, Pointer, Pointer, Size, Size]),
        "bough_weight_row": (None, [Pointer, Size, Pointer]),
        "bough_linear_scratch": (ctypes.c_size_t, [Pointer, integer, Size, integer]),
        "bough_linear_alone": (
            None,
            [Pointer, Pointer, integer, Pointer, Size, Pointer, Size, Pointer, Size, *[ctypes.c_bool] * 2, Pointer],
        ),
        "bough_linear_variant": (ctypes.c_char_p, [integer, ctypes.c_bool]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

"""Packed weights in the compiled library. Products are operations of its tapes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from bough.kernels.quant_linear.packed import Format, PackedWeight
from bough.native.library import load_library

Pointer, Size = ctypes.c_void_p, ctypes.c_int64


class WeightStruct(ctypes.Structure):
    """`bough_weight` of linear.h."""

    _fields_ = (("format", Size), ("n", Size), ("k", Size), ("blob", Pointer))


def variant(form: Format, *, prompt: bool = False) -> str:
    """The name of the variant that this CPU gets for tokens, of a prompt or not."""
    name: bytes = linear_library().bough_linear_variant(form, prompt)
    return name.decode()


def structs_of(parts: Sequence[PackedWeight]) -> ctypes.Array[WeightStruct]:
    """The parts as the library takes them; they must outlive the result."""
    made = [WeightStruct(part.format, part.n, part.k, part.blob.ctypes.data) for part in parts]
    return (WeightStruct * len(made))(*made)


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
            [Pointer, Pointer, integer, Pointer, Size, Pointer, Size, Pointer, Size, ctypes.c_bool, Pointer],
        ),
        "bough_linear_variant": (ctypes.c_char_p, [integer, ctypes.c_bool]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

"""Packed weights of the compiled library: what one is, which of GGUF's types can be packed how, and one in the making.

The layout of the bytes is described in `bough/native/src/linear_tile.h`; it is the same for every CPU. Rows arrive in
bands while a checkpoint is read; the first band decides the format, because only it says in what type the checkpoint
has the rows. Products are operations of the library's tapes.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from bough.core.errors import SettingsError
from bough.core.gguf_format import GGMLQuantizationType
from bough.native.library import load_library

GROUP = 32  # inputs of a row that share a scale
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


def packed_bytes(form: Format, outputs: int, inputs: int) -> int:
    """What a weight takes, in whole tiles of rows."""
    return int(linear_library().bough_weight_bytes(form, outputs, inputs))


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
        raise SettingsError("The CPU kernels are not compiled; run `bough build-kernels`.")
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
    return library


FOR_FLOATS = {"int8": Format.Q8, "int4": Format.Q4_MIN}  # by the name that `--quantization` has for it


def format_for(quantization: str, stored: GGMLQuantizationType, inputs: int) -> Format:
    """How rows of this type are kept: `none` as float32, `auto` as they are; `int8` and `int4` quantise floats, and
    keep what is quantised already, because quantising twice only loses. 16-bit floats become wider only
    while they are multiplied: reading them is what takes the time."""
    if quantization == "none" or inputs % GROUP:
        return Format.F32
    return FOR_FLOATS.get(quantization, NATURAL[stored]) if stored in FLOATS else NATURAL[stored]


def of_tables(quantization: str) -> str:
    """What is done to a vocabulary's vectors: `int4` leaves them 8 bits; 4 bits of these alone have cost SmolLM2 5 % of
    perplexity."""
    return "int8" if quantization == "int4" else quantization


class FillingWeight:
    """An `outputs` x `inputs` weight whose rows are handed over band by band; every band but the last has a multiple of
    16 rows."""

    def __init__(self, outputs: int, inputs: int, quantization: str) -> None:
        self.outputs, self.inputs = outputs, inputs
        self._quantization = quantization
        self._weight: PackedWeight | None = None

    @property
    def weight(self) -> PackedWeight:
        assert self._weight is not None, "no checkpoint has been read into this weight"
        return self._weight

    def format_of(self, stored: GGMLQuantizationType) -> Format:
        """How rows of this type are going to be kept."""
        return format_for(self._quantization, stored, self.inputs)

    def adopt(self, weight: PackedWeight) -> None:
        """Takes a weight that was packed earlier."""
        self._weight = weight

    def release(self) -> None:
        """Forgets the weight; another may be read."""
        self._weight = None

    def store(self, first: int, rows: npt.NDArray[np.uint8], stored: GGMLQuantizationType) -> None:
        """Packs rows as the checkpoint has them, from number `first` on. [rows, bytes of a row]"""
        library = linear_library()
        if self._weight is None or first == 0:  # another checkpoint may have another type
            form = self.format_of(stored)
            blob = aligned_bytes(packed_bytes(form, self.outputs, self.inputs))
            self._weight = PackedWeight(form, self.outputs, self.inputs, blob)
        weight, rows = self._weight, np.ascontiguousarray(rows)
        failed = library.bough_weight_pack(
            weight.format, stored, weight.n, weight.k, rows.ctypes.data, weight.blob.ctypes.data, first, len(rows)
        )
        if failed:
            raise ValueError(f"{stored.name} rows of {weight.k} inputs cannot be packed as {weight.format.name}.")

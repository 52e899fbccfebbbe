"""A packed weight in the making: rows arrive in bands while a checkpoint is read.

The first band decides the format, because only it says in what type the checkpoint has the rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from bough.kernels.quant_linear.native import linear_library
from bough.kernels.quant_linear.packed import FLOATS, GROUP, NATURAL, Format, PackedWeight, aligned_bytes

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
            size = library.bough_weight_bytes(form, self.outputs, self.inputs)
            self._weight = PackedWeight(form, self.outputs, self.inputs, aligned_bytes(size))
        weight, rows = self._weight, np.ascontiguousarray(rows)
        failed = library.bough_weight_pack(
            weight.format, stored, weight.n, weight.k, rows.ctypes.data, weight.blob.ctypes.data, first, len(rows)
        )
        if failed:
            raise ValueError(f"{stored.name} rows of {weight.k} inputs cannot be packed as {weight.format.name}.")

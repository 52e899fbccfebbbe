"""compressed-tensors' pack-quantized: integers packed along the inputs, zero points, if any, along the outputs."""

from functools import cached_property

import torch

from bough.kernels.w4_linear.reference import IntegerRows
from bough.loader.formats.base import IntegerTensor, unpacked, words_of
from bough.loader.quantization import Quantization
from bough.loader.source import Index, SafetensorsSource

MARK = ".weight_packed"
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")


class PackedIntegers(IntegerTensor):
    """weight_packed [outputs, inputs / 8], weight_scale [outputs, groups], weight_zero_point [outputs / 8, groups],
    weight_g_idx [inputs], weight_shape [2]; a scale for each output is one group."""

    _group_side = 1

    def __init__(self, files: SafetensorsSource, module: str) -> None:
        parts = tuple(f"{module}.{part}" for part in PARTS)
        self._packed, self._scales, self._zero_points, self._index, shape = parts
        outputs, inputs = (int(side) for side in files.read(shape))
        self.bits = next((bits for bits in (4, 8) if -(-inputs * bits // 32) == files.shape(self._packed)[1]), 0)
        super().__init__(files, f"{module}.weight", parts, (outputs, inputs))
        if not self.bits:
            raise self._wrong(f"{inputs} integers of 4 or 8 bits do not fill {files.shape(self._packed)[1]} words")

    @cached_property
    def symmetric(self) -> bool:
        return self._zero_points not in self.files

    def integers(self, index: Index) -> IntegerRows:
        rows, inputs, groups = self._cut(index, self.group_size)
        words = self.files.read(self._packed, (rows, words_of(inputs, self.bits)))
        codes = unpacked(words, self.bits, dim=1)[:, : inputs.stop - inputs.start]
        scales = self.files.read(self._scales, (rows, groups)).float()
        return IntegerRows(codes.contiguous(), scales, self.zeros(index))

    def zeros(self, index: Index) -> torch.Tensor:
        rows, _, groups = self._cut(index, self.group_size)
        if self.symmetric:
            start, stop = self._bounds(rows)
            return torch.full((stop - start, groups.stop - groups.start), self.middle, dtype=torch.uint8)
        words = self.files.read(self._zero_points, (slice(None), groups))
        return unpacked(words, self.bits, dim=0)[: self.shape[0]][rows]


def find(files: SafetensorsSource, name: str, quantization: Quantization) -> PackedIntegers | None:
    if not name.endswith(MARK) or files.dtype(name) != "I32":
        return None
    return PackedIntegers(files, name.removesuffix(MARK))

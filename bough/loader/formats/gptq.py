"""GPTQ: integers packed along the inputs, zero points along the outputs.

With act-order (`desc_act`) inputs were quantised by their weight: `g_idx` says which group each belongs to.
"""

import torch

from bough.kernels.w4_linear.reference import IntegerRows
from bough.loader.formats.base import IntegerTensor, unpacked, words_of
from bough.loader.quantization import Quantization
from bough.loader.source import Index, SafetensorsSource

MARK = ".qweight"


class GptqTensor(IntegerTensor):
    """qweight [inputs / 8, outputs], qzeros [groups, outputs / 8], scales [groups, outputs], g_idx [inputs]."""

    def __init__(self, files: SafetensorsSource, module: str, bits: int, zero_shift: int) -> None:
        self._weight, self._zero_points, self._scales, self._index = (
            f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
        )
        self.bits, self._zero_shift = bits, zero_shift
        packed, outputs = files.shape(self._weight)
        parts = (self._weight, self._zero_points, self._scales, self._index)
        super().__init__(files, f"{module}.weight", parts, (outputs, packed * 32 // bits))

    def integers(self, index: Index) -> IntegerRows:
        rows, inputs, groups = self._cut(index, self.group_size)
        words = self.files.read(self._weight, (words_of(inputs, self.bits), rows)).T.contiguous()  # less to transpose
        scales = self.files.read(self._scales, (groups, rows)).float()
        return IntegerRows(unpacked(words, self.bits, dim=1), scales.T.contiguous(), self.zeros(index))

    def zeros(self, index: Index) -> torch.Tensor:
        rows, _, groups = self._cut(index, self.group_size)
        zeros = unpacked(self.files.read(self._zero_points, (groups,)), self.bits, dim=1)[:, rows]
        # Stored zero points are one less than they are, within their bits.
        zeros = (zeros + self._zero_shift) & ((1 << self.bits) - 1) if self._zero_shift else zeros
        return zeros.T.contiguous()


def find(files: SafetensorsSource, name: str, quantization: Quantization) -> GptqTensor | None:
    if not name.endswith(MARK):
        return None
    return GptqTensor(files, name.removesuffix(MARK), quantization.bits, quantization.zero_shift)

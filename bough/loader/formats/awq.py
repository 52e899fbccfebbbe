"""AWQ as AutoAWQ's GEMM version stores it: integers and zero points packed along the outputs, eight to a word."""

import torch

from bough.kernels.w4_linear.reference import IntegerRows
from bough.loader.formats.base import IntegerTensor, unpacked
from bough.loader.quantization import Quantization
from bough.loader.source import Index, SafetensorsSource

MARK = ".qweight"
PER_WORD = 8
# Where in a word the outputs stand that come first, second and so on.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqTensor(IntegerTensor):
    """qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""

    bits = 4

    def __init__(self, files: SafetensorsSource, module: str) -> None:
        self._weight, self._zero_points, self._scales = parts = tuple(
            f"{module}.{part}" for part in ("qweight", "qzeros", "scales")
        )
        inputs, words = files.shape(self._weight)
        super().__init__(files, f"{module}.weight", parts, (words * PER_WORD, inputs))

    def integers(self, index: Index) -> IntegerRows:
        rows, inputs, groups = self._cut(index, self.group_size)
        scales = self.files.read(self._scales, (groups, rows)).float()
        return IntegerRows(self._outputs(self._weight, rows, inputs), scales.T.contiguous(), self.zeros(index))

    def zeros(self, index: Index) -> torch.Tensor:
        rows, _, groups = self._cut(index, self.group_size)
        return self._outputs(self._zero_points, rows, groups)

    def _outputs(self, name: str, rows: slice, lines: slice) -> torch.Tensor:
        """The integers of some outputs, a row for each, in those lines of the tensor."""
        start, stop = self._bounds(rows)
        first = start // PER_WORD
        words = self.files.read(name, (lines, slice(first, -(-stop // PER_WORD))))
        codes = unpacked(words.T.contiguous(), self.bits, dim=0, order=ORDER)  # whole words are the less to transpose
        return codes[start - first * PER_WORD : stop - first * PER_WORD]


def find(files: SafetensorsSource, name: str, quantization: Quantization) -> AwqTensor | None:
    return AwqTensor(files, name.removesuffix(MARK)) if name.endswith(MARK) else None

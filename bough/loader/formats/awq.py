"""AWQ as AutoAWQ's GEMM version stores it: integers and zero points packed along the outputs, eight to a word."""

from __future__ import annotations

import torch

from bough.kernels.w4_linear.reference import IntegerRows
from bough.loader.formats.base import WHOLE, IntegerTensor, unpacked
from bough.loader.quantization import Quantization
from bough.loader.source import SafetensorsSource

MARK = ".qweight"
PER_WORD = 8
# Where in a word the outputs stand that come first, second and so on.
ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


class AwqTensor(IntegerTensor):
    """qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""

    bits = 4

    def __init__(self, files: SafetensorsSource, module: str) -> None:
        self._weight, self._zeros, self._scales = parts = tuple(
            f"{module}.{part}" for part in ("qweight", "qzeros", "scales")
        )
        inputs, words = files.shape(self._weight)
        super().__init__(files, f"{module}.weight", parts, (words * PER_WORD, inputs))

    @property
    def groups(self) -> int:
        return self.files.shape(self._scales)[0]

    def integers(self, rows: slice) -> IntegerRows:
        scales = self.files.read(self._scales, (WHOLE, rows)).float()
        return IntegerRows(self._outputs(self._weight, rows), scales.T.contiguous(), self._outputs(self._zeros, rows))

    def _outputs(self, name: str, rows: slice) -> torch.Tensor:
        """The integers of some outputs, a row for each."""
        start, stop = self._bounds(rows)
        first = start // PER_WORD
        words = self.files.read(name, (WHOLE, slice(first, -(-stop // PER_WORD))))
        codes = unpacked(words, self.bits, dim=1).view(len(words), -1, PER_WORD)[:, :, ORDER].flatten(1)
        return codes[:, start - first * PER_WORD : stop - first * PER_WORD].T.contiguous()


def find(files: SafetensorsSource, name: str, quantization: Quantization) -> AwqTensor | None:
    return AwqTensor(files, name.removesuffix(MARK)) if name.endswith(MARK) else None

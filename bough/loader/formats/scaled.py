"""Numbers of 8 bits, floats or integers, with a scale for the tensor, each output, each group or each block.

The form is the same wherever it comes from: DeepSeek's blocks, compressed-tensors, ModelOpt. Static scales of
activations stand beside it and are not used: activations that are quantised get a scale of their own for each token.
"""

import torch

from bough.core.gguf_format import GGMLQuantizationType
from bough.kernels.quant_linear.packed import GROUP
from bough.kernels.quantize_rows.reference import GROUP as KEPT_GROUP
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.layers.weights import Form, KeptRows
from bough.loader.formats.base import QuantizedTensor
from bough.loader.quantization import Quantization
from bough.loader.source import Index, SafetensorsSource, StoredRows

MARK = ".weight"
SCALES = ("weight_scale", "weight_scale_inv")  # both are what the numbers are multiplied with
TYPES = ("F8_E4M3", "I8")


class ScaledTensor(QuantizedTensor):
    """weight [outputs, inputs], and a scale that is one number, [outputs, 1], [outputs, groups] or [blocks, blocks]."""

    def __init__(self, files: SafetensorsSource, module: str, scale: str, blocks: tuple[int, int] | None) -> None:
        weight, zeros = f"{module}.weight", f"{module}.weight_zero_point"
        super().__init__(files, weight, (weight, scale, zeros), files.shape(weight))
        self._scale, self._blocks = scale, blocks
        if zeros in files and bool(files.read(zeros).any()):
            raise self._wrong("integers of 8 bits with zero points are not supported; use a symmetric scheme")
        outputs, inputs = self.shape
        kinds = {(1, 1), (outputs, 1)}
        if blocks is not None:
            kinds.add((-(-outputs // blocks[0]), -(-inputs // blocks[1])))
        held = self._scale_shape()
        grouped = blocks is None and held[0] == outputs and inputs % held[1] == 0
        if held not in kinds and not grouped:
            raise self._wrong(f"scales of shape {list(held)} do not fit a weight of {outputs} x {inputs}")

    @property
    def by_row(self) -> bool:
        """Whether a row has one scale."""
        return self._scale_shape() in ((1, 1), (self.shape[0], 1))

    def form(self) -> Form | None:
        if not self.is_float:
            return None
        inputs, width = self.shape[1], self._block[1]
        if width >= inputs:
            return Form("fp8", inputs)
        return Form("fp8", inputs, width) if width == KEPT_GROUP else None

    def read_kept(self, index: Index, plane: int | None = None) -> KeptRows:
        rows, inputs, groups = self._cut(index, self._block[1])
        scales = self._row_scales(rows)[:, groups].contiguous()
        return QuantizedRows(self.files.read(self.name, (rows, inputs)), scales)

    @property
    def is_float(self) -> bool:
        return self.files.dtype(self.name) == "F8_E4M3"

    def read(self, index: Index) -> torch.Tensor:
        rows, inputs, _ = self._cut(index, self._block[1])
        values = self.files.read(self.name, (rows, inputs)).float()
        return values.mul_(self._row_scales(rows)[:, torch.arange(inputs.start, inputs.stop) // self._block[1]])

    def stored_type(self) -> GGMLQuantizationType | None:
        fits = not self.is_float and self.by_row and self.shape[1] % GROUP == 0
        return GGMLQuantizationType.Q8_0 if fits else None

    def read_stored(self, rows: slice) -> StoredRows:
        codes, scales = self.files.read(self.name, (rows,)), self._row_scales(rows)
        blocks = codes.view(len(codes), -1, GROUP)
        halves = scales.half()[:, None, :].expand(-1, blocks.shape[1], -1).contiguous()
        return torch.cat([halves.view(torch.int8), blocks], dim=2).view(torch.uint8).flatten(1).numpy(), (
            GGMLQuantizationType.Q8_0
        )

    @property
    def _block(self) -> tuple[int, int]:
        """Rows and inputs that share a scale."""
        height, width = self._scale_shape()
        if self.by_row or self._blocks is None:
            return self.shape[0] // height, self.shape[1] // width
        return self._blocks

    def _row_scales(self, rows: slice) -> torch.Tensor:
        """Those of each row. [rows, groups of inputs]"""
        start, stop = self._bounds(rows)
        return self._scales()[torch.arange(start, stop) // self._block[0]]

    def _scales(self) -> torch.Tensor:
        return self.files.read(self._scale).float().view(self._scale_shape())

    def _scale_shape(self) -> tuple[int, int]:
        shape = self.files.shape(self._scale)
        if len(shape) == 2:
            return shape[0], shape[1]
        return (1, 1) if shape in ((), (1,)) else (shape[0], 1)


def find(files: SafetensorsSource, name: str, quantization: Quantization) -> ScaledTensor | None:
    if not name.endswith(MARK) or files.dtype(name) not in TYPES:
        return None
    module = name.removesuffix(MARK)
    scale = next((f"{module}.{part}" for part in SCALES if f"{module}.{part}" in files), None)
    return None if scale is None else ScaledTensor(files, module, scale, quantization.blocks)

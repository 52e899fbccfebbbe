"""Floats of 4 bits (E2M1), two to a byte: MXFP4, a power of two for every 32, and NVFP4, an 8-bit float for every 16
and one number for the tensor."""

import torch

from bough.kernels.experts.fp4 import GROUP, VALUES, FloatRows, powers_of_two
from bough.layers.weights import Form, KeptRows
from bough.loader.formats.base import QuantizedTensor
from bough.loader.quantization import Quantization
from bough.loader.source import Index, SafetensorsSource


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """The numbers in bytes, the lower half of each first: twice as many along the last side. float32"""
    return VALUES[_codes(packed).int()]


def _codes(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


class Fp4Tensor(QuantizedTensor):
    """Bytes [outputs, inputs / 2], scales [outputs, groups], and for NVFP4 one number that is multiplied, or, by
    compressed-tensors, divided by."""

    def __init__(self, files: SafetensorsSource, module: str, packed: str, whole: str | None) -> None:
        self._packed, self._scale, self._whole = packed, f"{module}.weight_scale", whole
        outputs, half = files.shape(packed)
        parts = (packed, self._scale, *([] if whole is None else [whole]))
        super().__init__(files, f"{module}.weight", parts, (outputs, half * 2))
        if whole is None and files.dtype(self._scale) not in ("U8", "F8_E8M0"):
            raise self._wrong("4-bit floats without weight_global_scale must have powers of two as scales")

    def read(self, index: Index) -> torch.Tensor:
        size = self.shape[1] // self.files.shape(self._scale)[1]
        rows, inputs, own = self._around(index, size)
        values = fp4_values(self.files.read(self._packed, (rows, slice(inputs.start // 2, inputs.stop // 2))))
        scales = self._scales((rows, slice(inputs.start // size, inputs.stop // size)))
        return values.view(*scales.shape, -1).mul_(scales[:, :, None]).flatten(1)[:, own]

    def _scales(self, index: Index) -> torch.Tensor:
        scales = self.files.read(self._scale, index)
        if self._whole is None:
            return powers_of_two(scales.view(torch.uint8))
        whole = self.files.read(self._whole).float()
        return scales.float() / whole if self._whole.endswith(".weight_global_scale") else scales.float() * whole


class Mxfp4Experts(QuantizedTensor):
    """The matrices of all experts of a layer: `_blocks` [experts, outputs, groups, 16] and `_scales` [experts, outputs,
    groups]. Plain checkpoints have them transposed, [experts, inputs, outputs], and so are they read."""

    def __init__(self, files: SafetensorsSource, name: str) -> None:
        self._blocks, self._scales = f"{name}_blocks", f"{name}_scales"
        experts, outputs, groups, half = files.shape(self._blocks)
        super().__init__(files, name, (self._blocks, self._scales), (experts, groups * half * 2, outputs))

    def read(self, index: Index) -> torch.Tensor:
        experts, inputs, own = self._around(index, GROUP)
        groups = slice(inputs.start // GROUP, inputs.stop // GROUP)
        part = (experts, index[2] if len(index) > 2 else slice(None), groups)
        scales = powers_of_two(self.files.read(self._scales, part))
        values = fp4_values(self.files.read(self._blocks, part)).mul_(scales[..., None])
        return values.flatten(2).transpose(1, 2)[:, own].contiguous()

    def form(self) -> Form | None:
        """Of the matrix of one expert."""
        return Form("fp4", self.shape[1], GROUP)

    def read_kept(self, index: Index, plane: int | None = None) -> KeptRows:
        assert plane is not None, "experts are kept one by one"
        rows, _, groups = self._cut(index, GROUP)
        part = (slice(plane, plane + 1), rows, groups)
        codes = _codes(self.files.read(self._blocks, part)[0]).flatten(1)
        return FloatRows(codes, self.files.read(self._scales, part)[0])


def find(files: SafetensorsSource, name: str, quantization: Quantization) -> Fp4Tensor | None:
    """compressed-tensors', ModelOpt's and Quark's."""
    module, _, part = name.rpartition(".")
    if part == "weight_packed" and files.dtype(name) == "U8":
        whole = f"{module}.weight_global_scale"
        return Fp4Tensor(files, module, name, whole if whole in files else None)
    if part == "weight" and files.dtype(name) == "U8" and f"{module}.weight_scale" in files:
        whole = f"{module}.weight_scale_2"
        return Fp4Tensor(files, module, name, whole if whole in files else None)
    return None


def find_experts(files: SafetensorsSource, name: str, quantization: Quantization) -> Mxfp4Experts | None:
    return Mxfp4Experts(files, name.removesuffix("_blocks")) if name.endswith("_blocks") else None

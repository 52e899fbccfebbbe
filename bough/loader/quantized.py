"""Quantised safetensors checkpoints as a source of plain tensors: they are dequantised as they are read.

For the native CPU kernels small integers keep their bits: they are given in the form of GGUF's types where one of those
has the same values.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from bough.core.errors import ModelError
from bough.core.gguf_format import GGMLQuantizationType
from bough.layers.weights import Form, KeptRows
from bough.loader.formats import bitsandbytes, fp4, integers, scaled
from bough.loader.formats.base import QuantizedTensor
from bough.loader.locate import ModelFiles
from bough.loader.quantization import Quantization, quantization_of
from bough.loader.source import FLOAT_TYPES, Index, SafetensorsSource, StoredRows, WeightSource, float_rows

# Which kinds of tensors each quantisation method uses.
Finder = Callable[[SafetensorsSource, str, Quantization], QuantizedTensor | None]
FINDERS: Mapping[str, tuple[Finder, ...]] = {
    "fp8": (scaled.find,),
    "compressed-tensors": (integers.find_packed, scaled.find, fp4.find),
    "awq": (integers.find_awq,),
    "gptq": (integers.find_gptq,),
    "mxfp4": (fp4.find_experts,),
    "modelopt": (scaled.find, fp4.find),
    "bitsandbytes": (bitsandbytes.find,),
    "quark": (scaled.find, fp4.find),
}
NUMBERS = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # which a weight cannot have without a scale
FOLDED = ("pre_quant_scale",)  # activations would have to be multiplied with it
# Static scales are not used.
ACTIVATIONS = ("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "output_scale")


def plain_source(files: ModelFiles, dtype: torch.dtype) -> WeightSource:
    """The tensors of safetensors files by the names that they have there, dequantised."""
    stored, quantization = SafetensorsSource(files.safetensors), quantization_of(files)
    return stored if quantization is None else QuantizedSource(stored, quantization, dtype)


class QuantizedSource(WeightSource):
    """The tensors of quantised files by the names that a plain checkpoint has for them."""

    def __init__(self, files: SafetensorsSource, quantization: Quantization, dtype: torch.dtype) -> None:
        self._files, self._dtype = files, dtype  # the type in which dequantised matrices are kept on a CPU
        self._quantized = find_quantized(files, quantization)
        parts = {part for tensor in self._quantized.values() for part in tensor.parts}
        plain = [n for n in files.names() if n not in parts and n.rpartition(".")[2] not in ACTIVATIONS]
        self._names = [*plain, *self._quantized]

    def names(self) -> Sequence[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._quantized.get(name)
        return self._files.shape(name) if tensor is None else tensor.shape

    def stored_type(self, name: str) -> GGMLQuantizationType:
        tensor = self._quantized.get(name)
        if tensor is None:
            return self._files.stored_type(name)
        return tensor.stored_type() or FLOAT_TYPES[self._dtype]

    def form(self, name: str) -> Form | None:
        tensor = self._quantized.get(name)
        return None if tensor is None else tensor.form()

    def read_kept(self, name: str, index: Index = (), plane: int | None = None) -> KeptRows:
        return self._quantized[name].read_kept(index, plane)

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        tensor = self._quantized.get(name)
        return self._files.read(name, index) if tensor is None else tensor.read(index)

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        tensor = self._quantized.get(name)
        if tensor is None:
            return self._files.read_stored(name, index)
        rows, *columns = index or (slice(None),)
        whole = all(len(range(self.shape(name)[1])[part]) == self.shape(name)[1] for part in columns)
        if whole and tensor.stored_type() is not None:
            return tensor.read_stored(rows)
        return float_rows(tensor.read(index).to(self._dtype))


def find_quantized(files: SafetensorsSource, quantization: Quantization) -> dict[str, QuantizedTensor]:
    """The quantised tensors by the model's names. Whatever is in no such tensor is plain."""
    found = {}
    for name in files.names():
        for find in FINDERS[quantization.method]:
            tensor = find(files, name, quantization)
            if tensor is not None:
                found[tensor.name] = tensor
    for name in files.names():
        if name.rpartition(".")[2] in FOLDED:
            raise ModelError(f"Tensor {name}: activations with a scale for each input are not supported.")
        if name.endswith(".weight") and name not in found and files.dtype(name) in NUMBERS:
            raise ModelError(
                f"Tensor {name} has numbers of type {files.dtype(name)} without scales that {quantization.title} would "
                "have; the weights and the quantisation config do not belong together."
            )
    return found

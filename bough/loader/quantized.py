"""Quantised safetensors checkpoints as a source of plain tensors: they are dequantised as they are read.

For the native CPU kernels small integers keep their bits: they are given in the form of GGUF's types where one of those
has the same values.
"""

from collections.abc import Sequence

import torch
from gguf.constants import GGMLQuantizationType

from bough.layers.weights import Form, KeptRows
from bough.loader.formats.registry import find_quantized
from bough.loader.quantization import Quantization
from bough.loader.source import FLOAT_TYPES, Index, SafetensorsSource, StoredRows, WeightSource, float_rows

# Static scales are not used.
ACTIVATIONS = ("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "output_scale")


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

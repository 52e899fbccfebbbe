"""What all quantised tensors can be asked for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from bough.core.errors import ModelError
from bough.core.gguf_format import GGMLQuantizationType
from bough.layers.weights import Form, KeptRows
from bough.loader.source import Index, SafetensorsSource, StoredRows

WHOLE = slice(None)


class QuantizedTensor(ABC):
    """One tensor of the model, kept in several of the checkpoint."""

    def __init__(self, files: SafetensorsSource, name: str, parts: Sequence[str], shape: tuple[int, ...]) -> None:
        self.files, self.name, self.shape = files, name, shape
        self.parts = tuple(part for part in parts if part in files)  # names of the tensors that it is kept in

    @abstractmethod
    def read(self, index: Index) -> torch.Tensor:
        """A part, in float32."""

    def stored_type(self) -> GGMLQuantizationType | None:
        """The type of GGUF that holds the same values in as many bits, or nearly the same; None: there is none."""
        return None

    def read_stored(self, rows: slice) -> StoredRows:
        raise AssertionError(f"{self.name} has no type of GGUF")

    def form(self) -> Form | None:
        """The numbers that a layer on a GPU may keep; None: there is no product for them."""
        return None

    def read_kept(self, index: Index, plane: int | None = None) -> KeptRows:
        raise AssertionError(f"{self.name} has no form to be kept in")

    def _cut(self, index: Index, group: int) -> tuple[slice, slice, slice]:
        """The rows of a part, its inputs, and their groups of that size. Inputs are the second side."""
        rows, columns = (*index, WHOLE, WHOLE)[:2]
        start, stop, _ = columns.indices(self.shape[1])
        return rows, slice(start, stop), slice(start // group, -(-stop // group))

    def _around(self, index: Index, unit: int) -> tuple[slice, slice, slice]:
        """The rows of a part, the whole units of inputs that have all of its inputs, and which of those these are."""
        rows, inputs, units = self._cut(index, unit)
        first = units.start * unit
        around = slice(first, min(units.stop * unit, self.shape[1]))
        return rows, around, slice(inputs.start - first, inputs.stop - first)

    def _bounds(self, rows: slice) -> tuple[int, int]:
        start, stop, _ = rows.indices(self.shape[0])
        return start, stop

    def _wrong(self, why: str) -> ModelError:
        return ModelError(f"Tensor {self.name}: {why}; the weights and the quantisation config do not belong together.")

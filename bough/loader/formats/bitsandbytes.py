"""bitsandbytes with 4 bits: an index into a table of 16 numbers for each value, and a largest value for each block.

A tensor is quantised as one long row, so a block may reach from one row into the next. The largest values may be
quantised themselves, with 8 bits and blocks of their own.
"""

import json

import torch

from bough.loader.formats.base import QuantizedTensor
from bough.loader.quantization import Quantization
from bough.loader.source import Index, SafetensorsSource

STATE = ".weight.quant_state.bitsandbytes__"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class Bnb4Tensor(QuantizedTensor):
    """weight [values / 2, 1], the higher half of each byte first; its JSON is kept as the bytes of a tensor."""

    def __init__(self, files: SafetensorsSource, module: str, state: str) -> None:
        weight = f"{module}.weight"
        self._absmax, self._table, self._nested_absmax, self._nested_table = (f"{weight}.{part}" for part in PARTS)
        self._state = json.loads(bytes(files.read(state).tolist()))
        parts = (weight, state, *(f"{weight}.{part}" for part in PARTS))
        super().__init__(files, weight, parts, tuple(self._state["shape"]))

    def read(self, index: Index) -> torch.Tensor:
        rows, inputs, _ = self._cut(index, 1)
        width, block = self.shape[1], int(self._state["blocksize"])
        start, stop = (row * width for row in self._bounds(rows))
        packed = self.files.read(self.name, (slice(start // 2, -(-stop // 2)),)).flatten()
        pairs = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[start % 2 :][: stop - start]
        blocks = torch.arange(start, stop) // block
        largest = self._largest(int(blocks[0]), int(blocks[-1]) + 1)
        values = self.files.read(self._table).float()[pairs.int()]
        return values.mul_(largest[blocks - blocks[0]]).view(-1, width)[:, inputs]

    def _largest(self, start: int, stop: int) -> torch.Tensor:
        """The largest values of some blocks."""
        stored = self.files.read(self._absmax, (slice(start, stop),))
        if self._nested_absmax not in self.files:
            return stored.float()
        outer = torch.arange(start, stop) // int(self._state["nested_blocksize"])
        scales = self.files.read(self._nested_absmax).float()[outer]
        shrunk = self.files.read(self._nested_table).float()[stored.int()]
        return shrunk * scales + float(self._state["nested_offset"])


def find(files: SafetensorsSource, name: str, quantization: Quantization) -> Bnb4Tensor | None:
    module, found, _ = name.partition(STATE)
    return Bnb4Tensor(files, module, name) if found else None

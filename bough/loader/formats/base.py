"""What all quantised tensors can be asked for, and what those of small integers have in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from gguf.constants import GGMLQuantizationType

from bough.core.errors import ModelError
from bough.kernels.quant_linear.packed import GROUP
from bough.kernels.w4_linear.reference import IntegerRows
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


class IntegerTensor(QuantizedTensor):
    """A matrix of small integers, each row in groups of equal size with a scale and a zero point."""

    bits: int
    _scales: str  # the tensor that has those of all groups, and which of its sides counts these
    _group_side = 0
    _index = ""  # the tensor that has the group of each input, where there may be one

    @abstractmethod
    def integers(self, index: Index) -> IntegerRows:
        """Some rows, or whole groups of their inputs."""

    @abstractmethod
    def zeros(self, index: Index) -> torch.Tensor:
        """The zero points alone."""

    @cached_property
    def input_groups(self) -> torch.Tensor | None:
        """The group of each input; None: groups stand one after the other."""
        if self._index not in self.files:
            return None
        groups = self.files.read(self._index).long()
        regular = torch.arange(self.shape[1]) // self.group_size
        return None if torch.equal(groups, regular) or (groups < 0).any() else groups  # -1: not in use

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.files.shape(self._scales)[self._group_side]

    @cached_property
    def symmetric(self) -> bool:
        """Whether all zero points are in the middle."""
        return bool((self.zeros(()) == self.middle).all())

    @property
    def middle(self) -> int:
        return int(1 << (self.bits - 1))

    def read(self, index: Index) -> torch.Tensor:
        unit = math.lcm(self.group_size, 32) if self.input_groups is None else self.shape[1]  # whole words, too
        rows, inputs, own = self._around(index, unit)
        codes, scales, zeros = self.integers((rows, inputs))
        if self.input_groups is not None:
            return (codes.float() - zeros[:, self.input_groups]).mul_(scales[:, self.input_groups])[:, own]
        grouped = codes.view(*scales.shape, -1).float()
        return grouped.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)[:, own]

    def form(self) -> Form | None:
        regular = self.bits == 4 and self.input_groups is None
        return Form("int4", self.shape[1], self.group_size) if regular else None

    def read_kept(self, index: Index, plane: int | None = None) -> KeptRows:
        return self.integers(index)

    def stored_type(self) -> GGMLQuantizationType | None:
        if self.input_groups is not None or self.group_size % GROUP:
            return None
        if self.bits == 4:
            return GGMLQuantizationType.Q4_0 if self.symmetric else GGMLQuantizationType.Q4_1
        return GGMLQuantizationType.Q8_0 if self.symmetric else None

    def read_stored(self, rows: slice) -> StoredRows:
        codes, scales, zeros = self.integers((rows,))
        kind, count = self.stored_type(), len(codes)
        assert kind is not None
        blocks = codes.view(count, -1, GROUP)
        repeat = self.group_size // GROUP
        numbers = [scales] if self.symmetric else [scales, -scales * zeros]
        halves = torch.stack(numbers, dim=2).half().repeat_interleave(repeat, dim=1)
        if self.bits == 4:
            content = blocks[..., : GROUP // 2] | blocks[..., GROUP // 2 :] << 4
        else:
            content = blocks ^ 128  # the same as an int8 less 128
        return torch.cat([halves.view(torch.uint8), content], dim=2).view(count, -1).numpy(), kind


def words_of(codes: slice, bits: int) -> slice:
    """The 32-bit words that have these small integers."""
    return slice(codes.start * bits // 32, -(-codes.stop * bits // 32))


def unpacked(words: torch.Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """The small integers in 32-bit words along a side, the lowest bits first, or in the `order` of their places."""
    shifts = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    if dim == 0:
        return (words[:, None, :] >> shifts[:, None]).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(0, 1)
    return (words[:, :, None] >> shifts).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(1, 2)

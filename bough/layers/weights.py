"""How layers tell a loader what they need, without either knowing the other.

A layer yields one `WeightSlot` for each of its tensors. Names are those of Llama's checkpoints, whatever the model: its
family says where each stands in its own checkpoints (`bough.models.names`). The loader reads `tensor[index]` and hands
it to `fill`, in bands of rows from the first to the last. A slot with a `packing` is given the rows as they are stored,
one with a `form` as a quantised checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from bough.kernels.experts.fp4 import FloatRows
from bough.kernels.quant_linear.packed import FillingWeight
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.w4_linear.reference import IntegerRows

KeptRows = QuantizedRows | IntegerRows | FloatRows  # as a quantised checkpoint has them


@dataclass(frozen=True, slots=True)
class Form:
    """Numbers of a quantised checkpoint that a layer can keep."""

    kind: Literal["fp8", "int4", "fp4"]  # 8-bit floats; integers in groups; or, of experts, 4-bit floats in groups
    inputs: int
    group: int = 0  # inputs of an output that share a scale; 0: all

    def cut(self, index: tuple[slice, ...]) -> Form | None:
        """That of a part of the matrix; None: its inputs are no whole groups."""
        start, stop, _ = index[1].indices(self.inputs) if len(index) > 1 else (0, self.inputs, 1)
        inputs = stop - start
        if self.group in (0, self.inputs):
            return replace(self, inputs=inputs, group=min(self.group, inputs))
        if start % self.group or (stop % self.group and stop < self.inputs):
            return None
        alone = self.kind == "fp8" and inputs <= self.group
        return replace(self, inputs=inputs, group=0 if alone else self.group)

    def __str__(self) -> str:
        return f"{self.kind} in groups of {self.group}" if self.group else self.kind


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor of the model and the place that it, or this rank's part of it, is copied to."""

    name: str
    target: torch.Tensor  # a view of the layer's memory, already in the right shape, type and place
    index: tuple[slice, ...] = ()  # which part of the tensor belongs to this rank; empty: all of it
    # Where the layer keeps something else than a copy: takes the number of a band's first row, and the band.
    store: Callable[[int, torch.Tensor], None] | None = None
    packing: FillingWeight | None = None  # takes the place of the target, which then only has its shape
    form: Form | None = None  # in which the bands must be, for `keep`
    keep: Callable[[int, KeptRows], None] | None = None  # like `store`
    held: tuple[torch.Tensor, ...] = ()  # the layer's memory, where the target only has its shape

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """What the slot fills, unless it is packed."""
        return self.held or (self.target,)

    @property
    def nbytes(self) -> int:
        """Memory that the slot takes once it is filled."""
        return sum(part.nbytes for part in self.memory) if self.packing is None else self.packing.weight.blob.nbytes

    def fill(self, first: int, band: torch.Tensor) -> None:
        """Takes the rows from `first` on, in any type, on the device of the target."""
        if self.store is not None:
            self.store(first, band)
        else:
            self.target[first : first + band.shape[0]].copy_(band)


def quantized_slot(
    name: str,
    target: torch.Tensor,
    index: tuple[slice, ...],
    own: tuple[torch.Tensor, ...],
    form: Form | None,
    pack: Callable[[Any], Iterable[torch.Tensor]] = tuple,
    quantize: Callable[[torch.Tensor], KeptRows] | None = None,
) -> WeightSlot:
    """Fills `own` with what `pack` makes of rows, which the checkpoint has in that form or which are quantised as they
    come. A row is quantised by itself, so that bands can be: of a whole matrix there is never more than one."""

    def keep(first: int, band: KeptRows) -> None:
        for held, given in zip(own, pack(band), strict=True):
            held[first : first + len(given)].copy_(given)

    if quantize is None:
        return WeightSlot(name, target, index, form=form, keep=keep, held=tuple(own))
    return WeightSlot(name, target, index, lambda first, band: keep(first, quantize(band)), held=tuple(own))


class Filled(Protocol):
    """A layer, as far as loading it goes."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...


def slots_of(prefix: str, **parts: Filled) -> Iterator[WeightSlot]:
    """The slots of several layers, by the names that these have under `prefix`."""
    for name, part in parts.items():
        yield from part.slots(f"{prefix}{name}.")

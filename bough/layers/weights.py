"""How layers tell a loader what they need, without either knowing the other.

A layer yields one `WeightSlot` for each of its tensors. Names are those of Llama's checkpoints, whatever the model: its
family says where each stands in its own checkpoints (`bough.models.names`). The loader reads `tensor[index]` and hands
it to `fill`, in bands of rows from the first to the last. A slot with a `packing` is given the rows as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from bough.kernels.quant_linear.filling import FillingWeight


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One tensor of the model and the place that it, or this rank's part of it, is copied to."""

    name: str
    target: torch.Tensor  # a view of the layer's memory, already in the right shape, type and place
    index: tuple[slice, ...] = ()  # which part of the tensor belongs to this rank; empty: all of it
    # Where the layer keeps something else than a copy: takes the number of a band's first row, and the band.
    store: Callable[[int, torch.Tensor], None] | None = None
    packing: FillingWeight | None = None  # takes the place of the target, which then only has its shape

    @property
    def nbytes(self) -> int:
        """Memory that the slot takes once it is filled."""
        return self.target.nbytes if self.packing is None else self.packing.weight.blob.nbytes

    def fill(self, first: int, band: torch.Tensor) -> None:
        """Takes the rows from `first` on, in any type, on the device of the target."""
        if self.store is not None:
            self.store(first, band)
        else:
            self.target[first : first + band.shape[0]].copy_(band)


class Filled(Protocol):
    """A layer, as far as loading it goes."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...


def slots_of(prefix: str, **parts: Filled) -> Iterator[WeightSlot]:
    """The slots of several layers, by the names that these have under `prefix`."""
    for name, part in parts.items():
        yield from part.slots(f"{prefix}{name}.")

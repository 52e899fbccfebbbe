"""Sub-batches chosen on the host, and the way of small host arrays to the device.

A step handles together the rows that share a need (a penalty, a filter). `Part` names such rows; it owns no state. When
all rows of a batch share the need, taking and putting them costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.core.plan import BoolArray, IntArray


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A fresh host array as a tensor there. Pinned memory lets the copy queue behind running work without a wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a batch: where they stand in it, and which rows they are."""

    numbers: IntArray  # [part] row numbers, on the host
    rows: Tensor  # [part] int64, the same on the device
    places: Tensor | None  # [part] int64, indices into the batch; None: the part is the whole batch

    @classmethod
    def where(cls, mask: BoolArray, numbers: IntArray, device: torch.device) -> Part | None:
        """The rows of the batch `numbers` for which `mask` holds; None when there are none."""
        if mask.all():
            return cls(numbers, to_device(numbers.astype(np.int64), device), None) if len(mask) else None
        places = np.flatnonzero(mask)
        if not len(places):
            return None
        chosen = numbers[places]
        return cls(chosen, to_device(chosen.astype(np.int64), device), to_device(places, device))

    def take(self, tensor: Tensor) -> Tensor:
        """The part's rows of a batch-wide tensor: the tensor itself when the part is the whole batch, else a copy."""
        return tensor if self.places is None else tensor.index_select(0, self.places)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Writes the part's rows back. `values` may be what `take` gave, changed in place."""
        if self.places is not None:
            tensor.index_copy_(0, self.places, values)
        elif values is not tensor:
            tensor.copy_(values)

"""The way of small host arrays to the device and back, without ever making the host wait.

Copies are asynchronous only from and to pinned memory, and pinned memory may be written again only when the copy has
been made. A ring of arenas does that: one arena per step, used again after `depth` further steps, by which time the
scheduler has waited for that step's result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16  # bytes


class Arena:
    """Pinned memory of one step, handed out from the front."""

    def __init__(self, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A pinned copy of the array."""
        pinned = self.take(array.nbytes).view(_torch_type(array.dtype))[: array.size]
        pinned.numpy()[:] = array.ravel()
        return pinned

    def take(self, size: int) -> torch.Tensor:
        """Pinned bytes, rounded up to the alignment."""
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        if self._used > len(self._memory):  # an unusually large step: this arena is from now on as large
            self._memory = torch.empty(2 * self._used, dtype=torch.uint8, pin_memory=True)
            start, self._used = 0, -(-size // ALIGNMENT) * ALIGNMENT
        return self._memory[start : self._used]


class Staging:
    """A ring of arenas."""

    def __init__(self, device: torch.device, depth: int, size: int = 1 << 20) -> None:
        self._device = device
        self._arenas = [Arena(size) for _ in range(depth)]
        self._turn = 0

    def next_step(self) -> None:
        self._turn = (self._turn + 1) % len(self._arenas)
        self._arenas[self._turn].reset()

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A fresh device tensor with the array's contents, ordered on the current stream."""
        pinned = self._arenas[self._turn].put(array)
        return pinned.to(self._device, non_blocking=True).view(array.shape)

    def copy_into(self, target: torch.Tensor, array: npt.NDArray[Any]) -> None:
        target.copy_(self._arenas[self._turn].put(array), non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory that the tensor is being copied to; valid once an event recorded after this has happened, and
        until the ring comes round."""
        pinned = self._arenas[self._turn].take(tensor.nbytes).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        pinned.copy_(tensor, non_blocking=True)
        return pinned


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    kinds = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "bool": torch.bool}
    return kinds[dtype.name]

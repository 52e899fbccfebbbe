"""The way of small host arrays to the device and back, without ever making the host wait.

Copies are asynchronous only from and to pinned memory, and pinned memory may be written again only when the copy has
been made. A ring of arenas does that: one arena per step, used again after `depth` further steps, by which time the
scheduler has waited for that step's result.

What goes to the host is written by a kernel. A copy would wait behind those of whole pages that are on their way to the
host (`cuda_copies`), and with it all later steps.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16  # bytes
TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


class Arena:
    """Pinned memory of one step, handed out from the front. It is looked at as integers, flags and so on from the
    beginning: a tensor of another type takes longer to make than such a small copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._used, self._device = 0, device
        self._allocate(size)

    def reset(self) -> None:
        self._used = 0

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A pinned copy of the array, flat."""
        dtype = TORCH_TYPES[array.dtype]
        place = self._claim(array.size, array.itemsize)
        self._arrays[dtype][place] = array.ravel()
        return self._tensors[dtype][place]

    def take(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """So many pinned elements, and the same ones as kernels write them."""
        place = self._claim(count, dtype.itemsize)  # which may put other tensors there
        return self._tensors[dtype][place], self._mapped[dtype][place]

    def _claim(self, count: int, itemsize: int) -> slice:
        """Where so many elements of this size may stand; the memory may be another afterwards. What is used is rounded
        up to the alignment."""
        start, size = self._used, -(-count * itemsize // ALIGNMENT) * ALIGNMENT
        if start + size > self._size:  # an unusually large step: this arena is from now on as large
            self._allocate(2 * (start + size))
            start = 0
        self._used = start + size
        return slice(start // itemsize, start // itemsize + count)

    def _allocate(self, size: int) -> None:
        memory = pinned_bytes(size)
        self._size = size
        self._tensors = {dtype: memory.view(dtype) for dtype in TORCH_TYPES.values()}
        self._arrays = {dtype: tensor.numpy() for dtype, tensor in self._tensors.items()}
        mapped = memory if self._device.type == "cpu" else torch.as_tensor(Mapped(memory), device=self._device)
        if mapped.data_ptr() != memory.data_ptr():  # a copy: another GPU of this process has pinned it
            mapped = memory
        self._mapped = {dtype: mapped.view(dtype) for dtype in TORCH_TYPES.values()}


class Mapped:
    """Pinned memory as memory of the GPU, which has it at the same addresses."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory  # lives as long
        place = {"data": (memory.data_ptr(), False), "shape": (len(memory),), "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__ = place


class Staging:
    """A ring of arenas."""

    def __init__(self, device: torch.device, depth: int, size: int = 1 << 20) -> None:
        self._device = device
        self._arenas = [Arena(size, device) for _ in range(depth)]
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
        """Pinned memory that the flat tensor of integers is being written to; valid once an event recorded after this
        has happened, and until the ring comes round."""
        pinned, mapped = self._arenas[self._turn].take(len(tensor), tensor.dtype)
        if mapped.device == tensor.device:
            torch.bitwise_or(tensor, 0, out=mapped)
        else:
            pinned.copy_(tensor, non_blocking=True)
        return pinned


def pinned_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)

"""Row-wise primitives whose fast form depends on the device.

torch's argmax and sort use no vector instructions on CPUs, numpy's do and are ten times as fast; a CPU tensor and a
numpy array can share memory, so crossing over is free. On other devices torch's own kernels run, and nothing here makes
the host wait for them. The results are the same everywhere, up to the rounding of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # divides nearly every vocabulary in use; two levels of about equal width search fastest


class Workspace:
    """Large float32 buffers, by name, for use within one step.

    Fresh memory costs a CPU a fault per page, which here is more than the arithmetic done in it; so buffers are kept,
    and grow to the largest batch seen. Other devices have caching allocators, which do better than a buffer per name.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def lend(self, name: str, rows: int, width: int) -> Tensor:
        """An uninitialised [rows, width] tensor, until the next loan under this name."""
        if self._device.type != "cpu":
            return torch.empty((rows, width), device=self._device)
        size = rows * width
        if name not in self._kept or self._kept[name].numel() < size:
            self._kept[name] = torch.empty(size)
        return self._kept[name][:size].view(rows, width)


def padded_width(vocab_size: int) -> int:
    """The vocabulary's size, rounded up to whole blocks."""
    return -(-vocab_size // BLOCK) * BLOCK


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its first place. NaN counts as largest, so it shows in the value."""
    if logits.device.type != "cpu":
        values, indices = logits.max(dim=-1)
        return values, indices
    indices = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, indices[:, None]).squeeze(1), indices


def block_sums(weights: Tensor) -> Tensor:
    """Sums over blocks of `BLOCK`, in double precision for adding up further. [n, W] -> [n, W / BLOCK]

    Accelerators choose the order of a sum by the size of the batch; adding in double precision keeps a row's result the
    same in any company. CPUs keep one order, so there the faster sum is as good.
    """
    blocks = weights.view(len(weights), -1, BLOCK)
    if weights.device.type == "cpu":
        return blocks.sum(dim=-1).double()
    return blocks.sum(dim=-1, dtype=torch.float64)


def sort_cpu_(values: Tensor) -> Tensor:
    """Sorts each row of a CPU tensor in place, in ascending order."""
    values.numpy().sort(axis=-1)
    return values

"""Storage for the few rows that ask for more than a number each: vocabulary-wide lines, and lists of barred stop ids.

A count or a bias for every token of the vocabulary is large, and most requests want none. `VocabularyLines` owns one
such tensor, made when the first row asks for its line of it. Which rows have one, and what the numbers mean, is left to
its user.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.core.plan import IntArray


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A fresh host array as a tensor there. Pinned memory lets the copy queue behind running work without a wait."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class VocabularyLines:
    """`tensor[row]` is a vocabulary-wide line."""

    def __init__(self, rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = rows
        self.tensor = torch.empty((0, vocab_size), dtype=dtype, device=device)

    def clear(self, rows: IntArray) -> None:
        """Gives each of these rows a line full of zeros."""
        if not len(rows):
            return
        if not len(self.tensor):
            # Lines are cleared when they are asked for: until then a CPU's system need not provide the memory.
            self.tensor = self.tensor.new_empty((self._rows, self.tensor.shape[1]))
        self.tensor.index_fill_(0, to_device(rows.astype(np.int64), self.tensor.device), 0)

    def scatter(self, rows: IntArray, tokens: IntArray, values: Tensor) -> None:
        """Sets `values[i]` at token `tokens[i]` of row `rows[i]`; no pair may stand twice."""
        self.tensor.view(-1).index_copy_(0, self._flat(rows, tokens), values)

    def add_ones(self, rows: IntArray, tokens: IntArray) -> None:
        """Counts token `tokens[i]` of row `rows[i]`; a pair may stand many times."""
        flat = self._flat(rows, tokens)
        self.tensor.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=self.tensor.dtype))

    def _flat(self, rows: IntArray, tokens: IntArray) -> Tensor:
        flat = rows.astype(np.int64) * self.tensor.shape[1] + tokens
        return to_device(flat, self.tensor.device)


class StopBars:
    """Stop ids that a row must not say before it has said enough. `ids[row]`, on the device, are those of a row with a
    bar; shorter lines repeat their first. The host counts what each row still lacks: it samples a token with every step
    that it is part of."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.ids = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._left: dict[int, int] = {}  # tokens that a row has yet to sample

    def put_up(self, rows: Sequence[int], lines: Sequence[list[int]], tokens: Sequence[int]) -> None:
        """Bars the ids of `lines[i]`, of which there are some, to row `rows[i]` for so many tokens."""
        if not rows:
            return
        held = self.ids.shape[1]
        width = max(held, *map(len, lines))
        self.ids = torch.cat((self.ids, self.ids[:, :1].expand(-1, width - held)), dim=1)
        padded = np.array([line + line[:1] * (width - len(line)) for line in lines], dtype=np.int64)
        at = to_device(np.array(rows, dtype=np.int64), self.ids.device)
        self.ids.index_copy_(0, at, to_device(padded, self.ids.device))
        self._left.update(zip(rows, tokens, strict=True))

    def take_down(self, row: int) -> None:
        self._left.pop(row, None)

    def count_down(self, rows: IntArray) -> list[int]:
        """Each of these rows samples a token; returns those whose bar falls with it."""
        if not self._left:
            return []
        counted = self._left.keys() & set(rows.tolist())
        for row in counted:
            self._left[row] -= 1
        fallen = [row for row in counted if not self._left[row]]
        for row in fallen:
            del self._left[row]
        return fallen

"""Stop ids that a row must not say before it has said enough.

`StopBars` owns those ids on the device, and on the host how many tokens each such row still lacks: a row samples one
with every step that it is part of, so the host knows without looking when its bar falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bough.core.plan import IntArray
from bough.sampling.batch import to_device


class StopBars:
    """`ids[row]` are the barred ids of a row that has a bar; shorter lines repeat their first, barring it twice."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.ids = torch.zeros((rows, 0), dtype=torch.int64, device=device)
        self._left: dict[int, int] = {}  # tokens that a row has yet to sample

    def put_up(self, rows: Sequence[int], lines: Sequence[list[int]], tokens: Sequence[int]) -> None:
        """Bars the ids of `lines[i]`, of which there are some, to row `rows[i]` for so many tokens."""
        if not rows:
            return
        self._widen(max(len(line) for line in lines))
        width = self.ids.shape[1]
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

    def _widen(self, width: int) -> None:
        held = self.ids.shape[1]
        if width <= held:
            return
        grown = self.ids.new_zeros((self.ids.shape[0], width))
        grown[:, :held] = self.ids
        if held:
            grown[:, held:] = self.ids[:, :1]
        self.ids = grown

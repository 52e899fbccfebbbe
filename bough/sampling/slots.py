"""Vocabulary-wide storage, lent to the few rows that ask for it.

A count or a bias for every token of the vocabulary is too large to keep for every row, and most requests want none. A
`VocabularySlots` owns one such tensor, knows on the host which row holds which slot, and grows when all are lent. What
the numbers mean is left to its user.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bough.core.plan import IntArray
from bough.sampling.batch import to_device

FIRST_CAPACITY = 4


class VocabularySlots:
    """`tensor[slot]` is a vocabulary-wide line; `slot_of[row]` is the slot that a row holds, or -1."""

    def __init__(self, rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros((0, vocab_size), dtype=dtype, device=device)
        self.slot_of: IntArray = np.full(rows, -1, dtype=np.int32)
        self._free: list[int] = []

    @property
    def lent(self) -> int:
        return self.tensor.shape[0] - len(self._free)

    def lend(self, rows: IntArray) -> None:
        """Gives each of these rows, which hold none, a slot full of zeros."""
        if not len(rows):
            return
        self._grow_to(self.lent + len(rows))
        slots = np.array([self._free.pop() for _ in rows], dtype=np.int32)
        self.slot_of[rows] = slots
        self.tensor.index_fill_(0, to_device(slots.astype(np.int64), self.tensor.device), 0)

    def give_back(self, rows: IntArray) -> None:
        """Ends the loans of these rows; rows without a slot are passed over."""
        slots = self.slot_of[rows]
        self._free.extend(slots[slots >= 0].tolist())
        self.slot_of[rows] = -1

    def lines(self, rows: IntArray) -> Tensor:
        """A copy of what these rows hold, who all hold a slot. [rows, vocabulary]"""
        return self.tensor.index_select(0, to_device(self.slot_of[rows].astype(np.int64), self.tensor.device))

    def scatter(self, rows: IntArray, tokens: IntArray, values: Tensor) -> None:
        """Sets `values[i]` at token `tokens[i]` of row `rows[i]`; no pair may stand twice."""
        flat = self._flat(rows, tokens)
        self.tensor.view(-1).index_copy_(0, flat, values)

    def add_ones(self, rows: IntArray, tokens: IntArray) -> None:
        """Counts token `tokens[i]` of row `rows[i]`; a pair may stand many times."""
        flat = self._flat(rows, tokens)
        self.tensor.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=self.tensor.dtype))

    def check(self) -> None:
        """Every slot is either free or lent to exactly one row."""
        lent = self.slot_of[self.slot_of >= 0].tolist()
        if sorted(lent + self._free) != list(range(self.tensor.shape[0])):
            raise AssertionError(f"slots lent {lent} and free {self._free} are not all of {self.tensor.shape[0]}")

    def _flat(self, rows: IntArray, tokens: IntArray) -> Tensor:
        flat = self.slot_of[rows].astype(np.int64) * self.tensor.shape[1] + tokens
        return to_device(flat, self.tensor.device)

    def _grow_to(self, needed: int) -> None:
        capacity = self.tensor.shape[0]
        if needed <= capacity:
            return
        wider = max(needed, min(max(2 * capacity, FIRST_CAPACITY), len(self.slot_of)))
        grown = self.tensor.new_zeros((wider, self.tensor.shape[1]))
        grown[:capacity] = self.tensor
        self.tensor = grown
        self._free.extend(range(wider - 1, capacity - 1, -1))  # popped from the end: low slots first

"""How many tokens each decode computes in a step: its own and the drafts behind it.

Drafts come from the device (`Limits.drafts`) or from a proposer on the host. A row under a grammar gets those of the
host only: the host makes its masks, behind each draft, and does not know what the device guesses. No row gets more than
its request may still sample, so a step never writes beyond the pages that the request was admitted with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bough.core.plan import IntArray
from bough.scheduler.ports import Proposer
from bough.scheduler.rows import RowIndex, RowTable

NO_TOKENS: IntArray = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of each decode of a step: how many tokens it computes, and those of them that the host gives."""

    widths: IntArray  # [rows]
    given: IntArray  # [rows]
    tokens: IntArray  # [sum of given]
    some: bool = True  # False: all compute one token


class Drafting:
    def __init__(self, table: RowTable, device_drafts: int, proposer: Proposer | None) -> None:
        self._table = table
        self._proposer = proposer
        self.most = 1 + max(device_drafts, 0 if proposer is None else proposer.most)
        rows = len(table.requests)
        self._ones, self._zeros = np.ones(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
        for shared in (self._ones, self._zeros):  # every plan without drafts has views of them
            shared.setflags(write=False)

    def without(self, rows: RowIndex) -> Drafts:
        return Drafts(self._ones[: len(rows)], self._zeros[: len(rows)], NO_TOKENS, some=False)

    def decide(self, rows: RowIndex) -> Drafts:
        if self.most == 1:
            return self.without(rows)
        table = self._table
        largest = np.minimum(self.most, table.max_new[rows] - table.sampled[rows])
        if self._proposer is not None:
            return self._propose(self._proposer, rows, largest)
        return Drafts(np.where(table.constrained[rows], 1, largest), self._zeros[: len(rows)], NO_TOKENS)

    def _propose(self, proposer: Proposer, rows: RowIndex, largest: IntArray) -> Drafts:
        """The host's drafts, behind a token that it may not know yet."""
        table = self._table
        found = []
        for row, most in zip(rows.tolist(), largest.tolist(), strict=True):
            known = int(table.known[row])
            in_flight = int(table.sampled[row]) - (known - int(table.prompt_len[row]))
            drafts = proposer.propose(table.tokens[row, :known], in_flight, most - 1) if most > 1 else NO_TOKENS
            found.append(drafts[: most - 1])
        given = np.array([len(drafts) for drafts in found], dtype=np.int32)
        return Drafts(given + 1, given, np.concatenate([NO_TOKENS, *found]))

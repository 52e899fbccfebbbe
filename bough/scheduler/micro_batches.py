"""The rows that decode in one step of a pipeline.

A row decodes again once its token has come out of the last stage. So the rows are dealt out to as many steps as there
are stages: while the last stage has one micro-batch, those before it have the others. Owns whose turn it is.
"""

from __future__ import annotations

import numpy as np

from bough.scheduler.rows import Phase, RowIndex, RowTable


class MicroBatches:
    """`most` rows at a time; None: those behind their prompts, divided by the stages."""

    def __init__(self, table: RowTable, stages: int, most: int | None) -> None:
        self._table, self._stages, self._most = table, stages, most
        self._last = -1  # the row that was dealt last

    def next_of(self, decoding: RowIndex) -> RowIndex:
        """A micro-batch of the rows that decode, in their order: of those whose tokens are known, the next in turn."""
        table = self._table
        most = self._most or -(-np.count_nonzero(table.phase >= Phase.DECODE) // self._stages)
        ready = np.sort(decoding[table.length[decoding] < table.known[decoding]])
        turn = np.roll(ready, -int(np.searchsorted(ready, self._last, side="right")))[:most]
        if len(turn):
            self._last = int(turn[-1])
        return decoding[np.isin(decoding, turn)]

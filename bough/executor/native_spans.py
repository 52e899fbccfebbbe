"""Which tokens of a step are of prompts: CPUs with matrix tiles multiply those in another way than the rest.

What a token is decides, and not how many there are in a step. So each gets the same result to the last bit, alone or
in company, in whatever chunks its prompt is computed, and when an output is computed anew after a retraction or on
another machine. Deterministic inference promises more, that an output has the same bits when it comes back as part of a
prompt: then all tokens go one way. Owns the lengths of the rows' prompts.
"""

from __future__ import annotations

import numpy as np

from bough.core.plan import BoolArray, Limits, RowSetup
from bough.executor.layout import LongArray, StepLayout
from bough.native.tape import Spans

NO_SPANS = np.zeros(1, dtype=np.int64)


class PromptLengths:
    """Those of the rows; with `one_way` they count as none."""

    def __init__(self, limits: Limits, *, one_way: bool = False) -> None:
        self._lengths = np.zeros(limits.rows, dtype=np.int64)
        self._one_way = one_way

    def set_up(self, setups: tuple[RowSetup, ...]) -> None:
        for setup in setups:
            self._lengths[setup.row] = 0 if self._one_way else setup.prompt_len

    def marks(self, layout: StepLayout) -> BoolArray:
        """For each token whether it is of a prompt."""
        lengths = self._lengths[layout.rows]
        if len(layout.positions) != len(lengths):
            lengths = np.repeat(lengths, layout.query_lens)
        return layout.positions < lengths


def bounds_of(marks: BoolArray) -> LongArray:
    """Where spans begin and end that are by turns not marked and marked; the first may be empty."""
    if not marks.any():
        return NO_SPANS
    changes = np.flatnonzero(np.diff(marks, prepend=False))
    return np.concatenate(([0], changes, [len(marks)])).astype(np.int64)


def spans(bounds: LongArray) -> Spans:
    """As the library takes them; the bounds must outlive the result."""
    return Spans(bounds.ctypes.data, len(bounds) - 1)

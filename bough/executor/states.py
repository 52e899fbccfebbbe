"""The copies of recurrent states that plans ask for: those that rows begin with, and those that are kept of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bough.core.plan import BatchPlan, IntArray, RowSetup
from bough.memory.pools.state_pool import StatePool


class StateCopies:
    """Does nothing for a model without states. `table` is the host's page table of their group, the last one;
    `to_device` takes small arrays to where the pool is."""

    def __init__(
        self, states: StatePool | None, table: IntArray, to_device: Callable[[npt.NDArray[Any]], torch.Tensor]
    ) -> None:
        self._states, self._table, self._to_device = states, table, to_device

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Before a step: rows begin with a copy, or with the state of an empty sequence."""
        if self._states is not None and setups:
            own, sources = np.stack([setup.pages[-1] for setup in setups], axis=1)
            self._copy(sources, own)

    def keep(self, plan: BatchPlan) -> None:
        """After it: copies of states go to the pages that their rows got."""
        if self._states is not None and len(plan.new_pages[-1]):
            self._copy(self._table[plan.rows.repeat(plan.new_page_counts[-1]), 0], plan.new_pages[-1])

    def _copy(self, sources: IntArray, targets: IntArray) -> None:
        assert self._states is not None
        self._states.copy(*(self._to_device(pages.astype(np.int64)) for pages in (sources, targets)))

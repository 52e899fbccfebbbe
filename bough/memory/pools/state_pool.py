"""The states of recurrent layers: for each page, what all layers keep of one sequence.

Numbers are float32, whatever the model computes in: a state is added to once for each token. Page 0 is scratch, where
padding is written. A state cannot go back: where tokens may not hold, it stays until that is known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bough.core.model_config import RecurrentConfig
from bough.core.plan import BatchPlan, IntArray, RowSetup, positions_in_runs
from bough.kernels.recurrence.reference import StateRows
from bough.memory.pools.group_pool import GroupPool

Inputs = Sequence[torch.Tensor | None]  # of a kernel
COPIED_BYTES = 64 << 20  # most that is held twice while pages are copied, unless one page has more


class StatePool(GroupPool):
    """That of recurrent layers."""

    def __init__(self, config: RecurrentConfig, pages: int, device: torch.device) -> None:
        layers = sum(config.layers)
        self._memory = torch.empty((pages + 1, layers, config.size), dtype=torch.float32, device=device)
        tails = (config.conv_width - 1) * config.channels
        matrices = (config.heads, config.key_dim, config.value_dim)
        places = {layer: sum(config.layers[:layer]) for layer, recurs in enumerate(config.layers) if recurs}
        # By layer: the last inputs of its convolution, and the matrices of its heads.
        self.tails = {
            layer: self._memory[:, place, :tails].view(pages + 1, config.conv_width - 1, config.channels)
            for layer, place in places.items()
        }
        self.matrices = {
            layer: self._memory[:, place, tails:].view(pages + 1, *matrices) for layer, place in places.items()
        }
        self._put_off: list[tuple[Callable[..., torch.Tensor], Inputs, Inputs]] = []
        super().__init__([self._memory], 1, "states")

    def advance(
        self, kernel: Callable[..., torch.Tensor], tokens: Inputs, others: Inputs, rows: StateRows
    ) -> torch.Tensor:
        """What a layer's kernel makes of tokens. The states of the rows go on; of rows with drafts by `settle`, with
        copies of their tokens, which stand first: those of long prompts behind them are not kept."""
        if rows.drafted:
            count = int(rows.query_starts[rows.drafted])
            kept = [None if part is None else part[:count].clone() for part in tokens]
            self._put_off.append((kernel, kept, others))
        return kernel(*tokens, *others, rows)

    def settle(self, places: torch.Tensor, rows: StateRows) -> None:
        """Of the rows with drafts these tokens hold. [n] int64"""
        for kernel, tokens, others in self._put_off:
            kernel(*(None if part is None else part[places] for part in tokens), *others, rows)
        self._put_off.clear()

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Gives pages what others hold, one after the other: a source may be a later target. Source 0 stands for the
        state of an empty sequence. [n] int64 each"""
        some = COPIED_BYTES // max(1, self.page_bytes) or 1  # a stage may have none of the layers
        for begin in range(0, len(sources), some):
            taken = sources[begin : begin + some]
            held = self._memory.index_select(0, taken).masked_fill_((taken == 0)[:, None, None], 0.0)
            self._memory.index_copy_(0, targets[begin : begin + some], held)


class StateCopies:
    """The copies of states that plans ask for: those that rows begin with, and those that are kept of a row. Does
    nothing for a model without states. `table` is the host's page table of their group, the last one;
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

    def settle(self, plan: BatchPlan, counts: IntArray) -> None:
        """Once drafts are verified: the states of decodes, which stand first, go on by as many tokens as hold."""
        drafted = int(np.count_nonzero(plan.given < plan.query_lens))
        if self._states is None or not plan.query_lens[:drafted].max(initial=1) > 1:
            return
        lens, counts = plan.query_lens[:drafted], counts[:drafted]
        places = (lens.cumsum() - lens).repeat(counts) + positions_in_runs(counts)
        starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
        table, rows = self._table[plan.rows[:drafted], :1], np.arange(drafted, dtype=np.int32)
        held = StateRows(self._to_device(table), self._to_device(rows), starts, self._to_device(starts))
        self._states.settle(self._to_device(places.astype(np.int64)), held)

    def _copy(self, sources: IntArray, targets: IntArray) -> None:
        assert self._states is not None
        self._states.copy(*(self._to_device(pages.astype(np.int64)) for pages in (sources, targets)))

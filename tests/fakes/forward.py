"""Drives a model without an executor: rows, scattered pages and ragged steps, for tests of the compute rooms.

`Forward` owns a pool, a page table and what each row holds. A step names rows and their new tokens; the logits of all
their positions come back, row by row. Every slot of the pool starts as NaN, so reading what nobody wrote shows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.attention.context import ForwardContext
from bough.attention.torch_backend import TorchAttention
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.executor.adapters import adapter_rows
from bough.layers.adapters import AdapterSlots
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM
from bough.models.registry import build_model

CPU = torch.device("cpu")
Step = Mapping[int, Sequence[int]]  # row -> its new tokens


def load_model(
    config: ModelConfig,
    source: Mapping[str, torch.Tensor],
    topology: Topology | None = None,
    dtype: torch.dtype = torch.float32,
    quantization: str = "none",
    adapters: AdapterSlots | None = None,
) -> CausalLM:
    """A model with its slots filled from tensors by name."""
    model = build_model(config, topology or Topology(), dtype, CPU, quantization=quantization, adapters=adapters)
    for slot in model.slots():
        slot.fill(0, source[slot.name][slot.index])
    return model


class Forward:
    """Runs steps of one model."""

    def __init__(
        self,
        model: CausalLM,
        page_size: int = 1,
        pages: int = 512,
        rows: int = 8,
        dtype: torch.dtype = torch.float32,
        scales: Sequence[tuple[float, float]] | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.model, self._samples = model, (topology or Topology()).is_last
        self.pool = KVPool(model.config, (pages, pages), page_size, dtype, CPU, topology or Topology(), scales)
        states = self.pool.states
        matrices = () if states is None else (*states.tails.values(), *states.matrices.values())
        for tensor in (*self.pool.keys, *self.pool.values, *self.pool.index_keys.values(), *matrices):
            tensor.fill_(float("nan"))
        self.attention: AttentionBackend = TorchAttention()
        self.page_table = torch.zeros(rows, pages, dtype=torch.int32)
        self.lengths = [0] * rows
        self.adapters = np.zeros(rows, dtype=np.int64)  # their slots
        self._held = [0] * rows  # pages in each row's table
        # Free pages in a scattered order, so that no row's slots adjoin by luck.
        self._free = (np.random.default_rng(0).permutation(pages) + 1).tolist()

    def share(self, source: int, target: int, length: int) -> None:
        """Gives `target` the first pages of `source`, written or about to be written in the same step."""
        size = self.pool.page_size
        assert length % size == 0, "only full pages can be shared"
        self.page_table[target, : length // size] = self.page_table[source, : length // size]
        self.lengths[target], self._held[target] = length, length // size

    def reserve(self, row: int, length: int) -> None:
        """Takes pages so that the row can hold `length` tokens."""
        while self._held[row] * self.pool.page_size < length:
            self.page_table[row, self._held[row]] = self._free.pop()
            self._held[row] += 1

    @torch.inference_mode()
    def step(self, tokens: Step) -> dict[int, torch.Tensor]:
        """Computes one ragged batch. Returns logits [new tokens, vocab] for each row."""
        batch = self._batch(tokens)
        self.attention.prepare(batch)
        ids = torch.tensor([token for new in tokens.values() for token in new])
        slots = self.adapters[[row for row, new in tokens.items() for _ in new]]
        ctx = ForwardContext(self.attention, self.pool, batch, adapters=adapter_rows(slots, slots[:0]))
        hidden = self.model.forward(ids, ctx)
        logits = self.model.logits(hidden) if self._samples else hidden  # of which a stage before the last has none
        for row, new in tokens.items():
            self.lengths[row] += len(new)
        starts = batch.query_starts.tolist()
        return {row: logits[starts[i] : starts[i + 1]] for i, row in enumerate(tokens)}

    def _batch(self, tokens: Step) -> AttentionBatch:
        size = self.pool.page_size
        slots, positions = [], []
        for row, new in tokens.items():
            self.reserve(row, self.lengths[row] + len(new))
            for position in range(self.lengths[row], self.lengths[row] + len(new)):
                slots.append(int(self.page_table[row, position // size]) * size + position % size)
                positions.append(position)
        fresh = self.page_table[[row for row in tokens if not self.lengths[row]], 0].long()
        if self.pool.states is not None:
            self.pool.states.copy(torch.zeros_like(fresh), fresh)
        query_lens = np.array([len(new) for new in tokens.values()], dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        return AttentionBatch(
            rows=torch.tensor(list(tokens)),
            lengths=torch.tensor([self.lengths[row] + len(new) for row, new in tokens.items()], dtype=torch.int32),
            decodes=_leading_single(query_lens),
            query_lens=query_lens,
            query_starts=starts,
            context_lens=np.array([self.lengths[row] for row in tokens], dtype=np.int32),
            # Windows have the pages of full attention, and so has a row's state: the first of them.
            page_tables=(self.page_table,) * 2,
            starts=torch.from_numpy(starts),
            slots=(torch.tensor(slots),) * 2,
            positions=torch.tensor(positions),
            page_size=size,
            few_keys=bool((query_lens == 1).all()),
        )


def _leading_single(query_lens: np.ndarray) -> int:
    """How many rows at the front compute one token each."""
    several = np.flatnonzero(query_lens != 1)
    return int(several[0]) if len(several) else len(query_lens)

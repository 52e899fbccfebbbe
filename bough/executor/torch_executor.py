"""The executor for devices that torch drives synchronously: it runs each plan to its end before it returns.

Puts the parts together and owns none of the arithmetic: rows → forward pass → logits of the rows that want them →
sampling. `threaded` wraps it so that the scheduler need not wait.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.attention.context import ForwardContext
from bough.core.control import Command, CommandResult
from bough.core.plan import BatchPlan, BoolArray, IntArray, Limits, StepResult, TokenMasks
from bough.executor.control import ModelControl
from bough.executor.layout import LongArray, RowMirror, has_drafts, sampled_tokens
from bough.executor.verification import prompt_logprobs, sample_step
from bough.executor.weights import WeightStore
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState


class DeviceRows:
    """Owns what the device knows of each row; `apply` takes a plan in, `advance` notes what was sampled."""

    def __init__(self, limits: Limits) -> None:
        self._mirror = RowMirror(limits)
        self._page_size = limits.page_size
        self._page_tables = tuple(torch.from_numpy(self._mirror.pages))
        self._last_tokens = np.zeros(limits.rows, dtype=np.int64)

    def apply(self, plan: BatchPlan) -> tuple[torch.Tensor, AttentionBatch]:
        """Brings the rows up to date and returns the step's token ids with where everything stands."""
        layout = self._mirror.apply(plan)
        ids = layout.token_ids
        ids[layout.from_device] = self._last_tokens[plan.rows[plan.given < plan.query_lens]]
        batch = AttentionBatch(
            rows=torch.from_numpy(layout.rows),
            lengths=torch.from_numpy(layout.lengths),
            # Decodes with drafts attend as prompts do.
            decodes=0 if has_drafts(plan) else int((plan.given < plan.query_lens).sum()),
            query_lens=layout.query_lens,
            query_starts=layout.query_starts,
            context_lens=layout.context_lens,
            page_tables=self._page_tables,
            slots=tuple(torch.from_numpy(layout.slots)),
            positions=torch.from_numpy(layout.positions),
            page_size=self._page_size,
        )
        return torch.from_numpy(ids), batch

    def advance(self, rows: IntArray, tokens: npt.NDArray[np.int64]) -> None:
        """Notes the tokens that these rows have just sampled: their next decode begins with them."""
        self._last_tokens[rows] = tokens

    def give_back(self, rows: IntArray, missing: IntArray) -> None:
        """So many drafts of these rows did not hold."""
        self._mirror.give_back(rows, missing)


class TorchExecutor:
    """Runs plans on the calling thread."""

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        attention: AttentionBackend,
        limits: Limits,
        weights: WeightStore | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._limits = limits
        self._rows = DeviceRows(limits)
        self._sampling = SamplingState(limits.rows, limits.vocab_size, "cpu")
        self._control = ModelControl(weights, pool)

    def limits(self) -> Limits:
        return self._limits

    def control(self, command: Command) -> CommandResult:
        return self._control.run(command)

    @torch.inference_mode()
    def run(self, plan: BatchPlan, masks: Callable[[], TokenMasks]) -> StepResult:
        self._sampling.setup(plan.setups)
        token_ids, batch = self._rows.apply(plan)
        self._attention.prepare(batch)
        last = torch.from_numpy(sampled_tokens(plan, batch.query_starts))
        context = ForwardContext(self._attention, self._pool, batch, None if plan.input_logprobs else last)
        hidden = self._model.forward(token_ids, batch.positions, context)

        starts = batch.query_starts
        inputs = prompt_logprobs(plan, self._sampling, hidden, starts, lambda at: self._model.logits)
        if plan.input_logprobs:
            hidden = hidden.index_select(0, last)
        logits = self._model.logits(hidden).float() if plan.sample.any() else hidden  # which is then not looked at

        def draw(lines: LongArray | None, rows: IntArray, masks: BatchMasks | None) -> tuple[LongArray, BoolArray]:
            of_rows = logits if lines is None else logits[torch.from_numpy(lines)]
            sampled = sample(self._sampling, of_rows, rows, masks)
            return sampled.tokens.numpy(), sampled.bad.numpy()

        sampled, rows = sample_step(plan, draw, masks), plan.rows[plan.sample]
        self._rows.advance(rows, sampled.last)
        self._rows.give_back(rows, sampled.widths - sampled.counts)
        return sampled.result(plan, logits, self._sampling.specs(rows), inputs)

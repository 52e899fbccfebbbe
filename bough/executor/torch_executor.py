"""The executor for devices that torch drives synchronously: it runs each plan to its end before it returns.

Puts the parts together and owns none of the arithmetic: rows → forward pass → logits of the rows that want them →
sampling. `threaded` wraps it so that the scheduler need not wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bough.attention.base import AttentionBackend
from bough.attention.context import ForwardContext
from bough.core.plan import BatchPlan, BoolArray, IntArray, Limits, StepResult, TokenMasks
from bough.executor.device_rows import DeviceRows
from bough.executor.layout import LongArray, sampled_tokens
from bough.executor.verification import prompt_logprobs, sample_step
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState


class TorchExecutor:
    """Runs plans on the calling thread."""

    def __init__(self, model: CausalLM, pool: KVPool, attention: AttentionBackend, limits: Limits) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._limits = limits
        self._rows = DeviceRows(limits)
        self._sampling = SamplingState(limits.rows, limits.vocab_size, "cpu")

    def limits(self) -> Limits:
        return self._limits

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

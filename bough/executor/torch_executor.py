"""The executor for devices that torch drives synchronously: it runs each plan to its end before it returns.

Puts the parts together and owns none of the arithmetic: rows → forward pass → logits of the rows that want them →
sampling. `threaded` wraps it so that the scheduler need not wait.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.context import ForwardContext
from bough.core.control import Command, CommandResult
from bough.core.plan import (
    BatchPlan,
    BoolArray,
    InputLogprobs,
    IntArray,
    Limits,
    LogprobSpec,
    PositionLogprobs,
    StepResult,
    TokenMasks,
)
from bough.executor.control import ModelControl
from bough.executor.device_rows import DeviceRows
from bough.executor.layout import LongArray, has_drafts, prompt_targets, sampled_tokens
from bough.executor.verification import verify
from bough.executor.weights import WeightStore
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM
from bough.sampling.logprobs import input_logprobs, output_logprobs
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState


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

        inputs = {w.index: self._input_logprobs(plan, w, hidden, batch.query_starts) for w in plan.input_logprobs}
        sampling_rows = plan.rows[plan.sample]
        if not len(sampling_rows):
            none = np.zeros(0, dtype=np.int32)
            return StepResult(plan.step, none.reshape(0, 1), none, none.astype(np.bool_), {}, inputs)
        if plan.input_logprobs:
            hidden = hidden.index_select(0, last)
        logits = self._model.logits(hidden).float()
        if has_drafts(plan):
            return self._verify(plan, logits, BatchMasks.on_host(plan, masks), inputs)
        sampled = sample(self._sampling, logits, sampling_rows, BatchMasks.on_host(plan, masks))
        tokens = sampled.tokens.numpy()
        self._rows.advance(sampling_rows, tokens)
        return StepResult(
            step=plan.step,
            tokens=tokens.astype(np.int32).reshape(-1, 1),
            counts=np.ones(len(tokens), dtype=np.int32),
            bad=sampled.bad.numpy(),
            output_logprobs=self._output_logprobs(plan, logits, sampled.tokens),
            input_logprobs=inputs,
        )

    def _verify(
        self, plan: BatchPlan, logits: torch.Tensor, masks: BatchMasks | None, inputs: dict[int, PositionLogprobs]
    ) -> StepResult:
        """The result of a step with drafts."""

        def draw(lines: LongArray, rows: IntArray, masks: BatchMasks | None) -> tuple[LongArray, BoolArray]:
            sampled = sample(self._sampling, logits[torch.from_numpy(lines)], rows, masks)
            return sampled.tokens.numpy(), sampled.bad.numpy()

        verified, rows = verify(plan, draw, masks), plan.rows[plan.sample]
        self._rows.advance(rows, verified.last)
        self._rows.give_back(rows, verified.widths - verified.counts)
        return verified.result(plan, logits, self._sampling.specs(rows), inputs)

    def _output_logprobs(
        self, plan: BatchPlan, logits: torch.Tensor, tokens: torch.Tensor
    ) -> dict[int, PositionLogprobs]:
        specs = self._sampling.specs(plan.rows[plan.sample])
        if specs is None:
            return {}
        found = output_logprobs(logits, tokens, specs).read()
        places = np.flatnonzero(plan.sample).tolist()
        return {place: run for place, run in zip(places, found, strict=True) if run is not None}

    def _input_logprobs(
        self, plan: BatchPlan, want: InputLogprobs, hidden: torch.Tensor, starts: IntArray
    ) -> PositionLogprobs:
        first = int(starts[want.index]) + want.first
        spec = self._sampling.logprob_specs[int(plan.rows[want.index])] or LogprobSpec()
        positions = hidden[first : first + want.count]
        return input_logprobs(self._model.logits, positions, torch.from_numpy(prompt_targets(plan, want)), spec)

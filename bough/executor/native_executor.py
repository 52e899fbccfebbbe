"""The executor for CPUs with native kernels: a step is one call into the compiled library, then sampling.

Owns the rows and the sampling state, as `torch_executor` does; the forward pass is a tape. `threaded` wraps it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

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
from bough.executor.layout import LongArray, RowMirror, StepLayout, has_drafts, prompt_targets, sampled_tokens
from bough.executor.native_sampling import NativeSampler
from bough.executor.native_spans import NO_SPANS, PromptLengths, bounds_of, spans
from bough.executor.native_tapes import NativeTapes
from bough.executor.verification import verify
from bough.executor.weights import WeightStore
from bough.native.tape import Step
from bough.sampling.logprobs import input_logprobs, output_logprobs
from bough.sampling.masks import BatchMasks
from bough.sampling.state import SamplingState


class NativeExecutor:
    """Runs plans on the calling thread and those of the crew."""

    def __init__(
        self,
        tapes: NativeTapes,
        limits: Limits,
        *,
        deterministic: bool = False,
        weights: WeightStore | None = None,
    ) -> None:
        self._tapes = tapes
        self._limits = limits
        self._control = ModelControl(weights, tapes.pool, drop=tapes.drop, rebuild=tapes.record)
        self._mirror = RowMirror(limits)
        self._prompts = PromptLengths(limits, one_way=deterministic)
        self._last_tokens = np.zeros(limits.rows, dtype=np.int64)
        self._sampling = SamplingState(limits.rows, limits.vocab_size, "cpu")
        self._sample = NativeSampler(self._sampling, tapes.crew)
        self._step = Step(
            page_table=self._mirror.pages.ctypes.data,
            page_table_width=self._mirror.pages.shape[1],
            page_size=limits.page_size,
        )

    def limits(self) -> Limits:
        return self._limits

    def control(self, command: Command) -> CommandResult:
        return self._control.run(command)

    @property
    def threads(self) -> int:
        """How many compute."""
        return self._tapes.crew.threads

    def set_threads(self, threads: int) -> None:
        """Lets so many compute from the next step on; no more than there were at first."""
        if threads != self.threads:
            self._tapes.set_threads(threads)
            self._sample = NativeSampler(self._sampling, self._tapes.crew)

    def run(self, plan: BatchPlan, masks: Callable[[], TokenMasks]) -> StepResult:
        self._sampling.setup(plan.setups)
        self._prompts.set_up(plan.setups)
        layout = self._mirror.apply(plan)
        prompts = self._prompts.marks(layout)
        layout.token_ids[layout.from_device] = self._last_tokens[plan.rows[plan.given < plan.query_lens]]
        wanted = sampled_tokens(plan, layout.query_starts) if plan.sample.any() else np.zeros(0, dtype=np.int64)
        inputs: dict[int, PositionLogprobs] = {}
        drafts = has_drafts(plan)
        if plan.input_logprobs or drafts:  # of each row more than its last token is asked for
            hidden = self._forward_whole(layout, prompts)
            inputs = {
                w.index: self._input_logprobs(plan, w, hidden, prompts, layout.query_starts)
                for w in plan.input_logprobs
            }
            logits = self._logits(hidden[torch.from_numpy(wanted)], prompts[wanted])
        else:
            logits = self._forward(layout, wanted, prompts)
        if not len(wanted):
            none = np.zeros(0, dtype=np.int32)
            return StepResult(plan.step, none.reshape(0, 1), none, none.astype(np.bool_), {}, inputs)
        sampling_rows = plan.rows[plan.sample]
        if drafts:
            return self._verify(plan, logits, BatchMasks.on_host(plan, masks), inputs)
        drawn = self._sample(logits, sampling_rows, BatchMasks.on_host(plan, masks))
        self._last_tokens[sampling_rows] = drawn.tokens
        return StepResult(
            step=plan.step,
            tokens=drawn.tokens.astype(np.int32).reshape(-1, 1),
            counts=np.ones(len(sampling_rows), dtype=np.int32),
            bad=drawn.bad,
            output_logprobs=self._output_logprobs(plan, logits, drawn.tokens),
            input_logprobs=inputs,
        )

    def _verify(
        self, plan: BatchPlan, logits: torch.Tensor, masks: BatchMasks | None, inputs: dict[int, PositionLogprobs]
    ) -> StepResult:
        """The result of a step with drafts."""

        def draw(lines: LongArray, rows: IntArray, masks: BatchMasks | None) -> tuple[LongArray, BoolArray]:
            drawn = self._sample(logits[torch.from_numpy(lines)], rows, masks)
            return drawn.tokens, drawn.bad

        verified, rows = verify(plan, draw, masks), plan.rows[plan.sample]
        self._last_tokens[rows] = verified.last
        self._mirror.give_back(rows, verified.widths - verified.counts)
        return verified.result(plan, logits, self._sampling.specs(rows), inputs)

    def _forward(self, layout: StepLayout, wanted: LongArray, prompts: BoolArray) -> torch.Tensor:
        """The logits of the wanted tokens, until the next step: the first lines of what is returned."""
        bounds, wanted_bounds = bounds_of(prompts), bounds_of(prompts[wanted])
        self._describe(layout, wanted, bounds, wanted_bounds)
        self._tapes.run(self._tapes.last_tokens, self._step)
        return self._tapes.last_tokens.result

    def _forward_whole(self, layout: StepLayout, prompts: BoolArray) -> torch.Tensor:
        """The hidden states of all tokens, until the next step."""
        bounds = bounds_of(prompts)
        self._describe(layout, np.zeros(0, dtype=np.int64), bounds, NO_SPANS)
        self._tapes.run(self._tapes.all_tokens, self._step)
        return self._tapes.all_tokens.result[: len(layout.token_ids)]

    def _logits(self, hidden: torch.Tensor, prompts: BoolArray) -> torch.Tensor:
        """The logits of some tokens' hidden states, at most as many as there are rows; until the next call."""
        recorded = self._tapes.logits
        assert recorded.input is not None
        recorded.input[: len(hidden)] = hidden
        bounds = bounds_of(prompts)
        self._tapes.run(recorded, Step(wanted=len(hidden), wanted_prompts=spans(bounds)))
        return recorded.result[: len(hidden)]

    def _describe(self, layout: StepLayout, wanted: LongArray, bounds: LongArray, wanted_bounds: LongArray) -> None:
        """Points the step at these arrays, which outlive the run."""
        step = self._step
        step.tokens, step.batch, step.wanted = len(layout.token_ids), len(layout.rows), len(wanted)
        step.token_ids, step.positions = layout.token_ids.ctypes.data, layout.positions.ctypes.data
        step.slots, step.wanted_tokens = layout.slots.ctypes.data, wanted.ctypes.data
        step.rows, step.query_starts = layout.rows.ctypes.data, layout.query_starts.ctypes.data
        step.context_lens = layout.context_lens.ctypes.data
        step.prompts, step.wanted_prompts = spans(bounds), spans(wanted_bounds)

    def _output_logprobs(self, plan: BatchPlan, logits: torch.Tensor, tokens: LongArray) -> dict[int, PositionLogprobs]:
        specs = self._sampling.specs(plan.rows[plan.sample])
        if specs is None:
            return {}
        with torch.inference_mode():
            found = output_logprobs(logits[: len(tokens)], torch.from_numpy(tokens), specs).read()
        places = np.flatnonzero(plan.sample).tolist()
        return {place: run for place, run in zip(places, found, strict=True) if run is not None}

    @torch.inference_mode()
    def _input_logprobs(
        self, plan: BatchPlan, want: InputLogprobs, hidden: torch.Tensor, prompts: BoolArray, starts: IntArray
    ) -> PositionLogprobs:
        first = int(starts[want.index]) + want.first
        spec = self._sampling.logprob_specs[int(plan.rows[want.index])] or LogprobSpec()
        positions, marks = hidden[first : first + want.count], prompts[first : first + want.count]

        def logits_of(block: torch.Tensor) -> torch.Tensor:  # asked for one block after the other
            nonlocal marks
            of_block, marks = np.split(marks, [len(block)])
            return self._logits(block, of_block)

        return input_logprobs(logits_of, positions, torch.from_numpy(prompt_targets(plan, want)), spec)

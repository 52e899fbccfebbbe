"""The executor for CPUs with native kernels: a step is one call into the compiled library, then sampling.

Owns the rows and the sampling state, as `torch_executor` does; the forward pass is a tape. `threaded` wraps it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bough.core.plan import BatchPlan, BoolArray, IntArray, Limits, PositionLogprobs, StepResult, TokenMasks
from bough.executor.layout import LongArray, RowMirror, StepLayout, has_drafts, sampled_tokens
from bough.executor.native_sampling import NativeSampler
from bough.executor.native_spans import NO_SPANS, PromptLengths, bounds_of, spans
from bough.executor.native_tapes import NativeTapes
from bough.executor.verification import prompt_logprobs, sample_step
from bough.native.tape import Step
from bough.sampling.masks import BatchMasks
from bough.sampling.state import SamplingState


class NativeExecutor:
    """Runs plans on the calling thread and those of a thread pool."""

    def __init__(self, tapes: NativeTapes, limits: Limits, *, deterministic: bool = False) -> None:
        self._tapes = tapes
        self._limits = limits
        self._mirror = RowMirror(limits)
        self._prompts = PromptLengths(limits, one_way=deterministic)
        self._last_tokens = np.zeros(limits.rows, dtype=np.int64)
        self._sampling = SamplingState(limits.rows, limits.vocab_size, "cpu")
        self._sample = NativeSampler(self._sampling, tapes.thread_pool)
        self._step = Step(
            page_table=self._mirror.pages.ctypes.data,
            page_table_stride=self._mirror.pages[0].size,
            page_table_width=self._mirror.pages.shape[2],
            page_size=limits.page_size,
        )

    def limits(self) -> Limits:
        return self._limits

    @property
    def threads(self) -> int:
        """How many compute."""
        return self._tapes.thread_pool.threads

    def set_threads(self, threads: int) -> None:
        """Lets so many compute from the next step on; no more than there were at first."""
        if threads != self.threads:
            self._tapes.set_threads(threads)
            self._sample = NativeSampler(self._sampling, self._tapes.thread_pool)

    def run(self, plan: BatchPlan, masks: Callable[[], TokenMasks]) -> StepResult:
        self._sampling.setup(plan.setups)
        self._prompts.set_up(plan.setups)
        layout = self._mirror.apply(plan)
        prompts = self._prompts.marks(layout)
        layout.token_ids[layout.from_device] = self._last_tokens[plan.rows[plan.given < plan.query_lens]]
        indices = sampled_tokens(plan, layout.query_starts) if plan.sample.any() else np.zeros(0, dtype=np.int64)
        inputs: dict[int, PositionLogprobs] = {}
        if plan.input_logprobs or has_drafts(plan):  # of each row more than its last token is asked for
            hidden = self._forward_whole(layout, prompts)
            starts = layout.query_starts
            inputs = prompt_logprobs(plan, self._sampling, hidden, starts, lambda at: self._logits_of(prompts[at]))
            logits = self._logits(hidden[torch.from_numpy(indices)], prompts[indices])
        else:
            logits = self._forward(layout, indices, prompts)

        def draw(lines: LongArray | None, rows: IntArray, masks: BatchMasks | None) -> tuple[LongArray, BoolArray]:
            drawn = self._sample(logits if lines is None else logits[torch.from_numpy(lines)], rows, masks)
            return drawn.tokens, drawn.bad

        sampled, rows = sample_step(plan, draw, masks), plan.rows[plan.sample]
        self._last_tokens[rows] = sampled.last
        self._mirror.give_back(rows, sampled.widths - sampled.counts)
        return sampled.result(plan, logits, self._sampling.specs(rows), inputs)

    def _forward(self, layout: StepLayout, indices: LongArray, prompts: BoolArray) -> torch.Tensor:
        """The logits of the tokens at `indices`, until the next step: the first lines of what is returned."""
        bounds, logits_bounds = bounds_of(prompts), bounds_of(prompts[indices])
        self._describe(layout, indices, bounds, logits_bounds)
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
        self._tapes.run(recorded, Step(logits_count=len(hidden), logits_prompts=spans(bounds)))
        return recorded.result[: len(hidden)]

    def _logits_of(self, prompts: BoolArray) -> Callable[[torch.Tensor], torch.Tensor]:
        """The logits of these tokens' hidden states, asked for one block of them after the other."""

        def logits_of(block: torch.Tensor) -> torch.Tensor:
            nonlocal prompts
            of_block, prompts = np.split(prompts, [len(block)])
            return self._logits(block, of_block)

        return logits_of

    def _describe(self, layout: StepLayout, indices: LongArray, bounds: LongArray, logits_bounds: LongArray) -> None:
        """Points the step at these arrays, which outlive the run."""
        step = self._step
        step.tokens, step.batch, step.logits_count = len(layout.token_ids), len(layout.rows), len(indices)
        step.token_ids, step.positions = layout.token_ids.ctypes.data, layout.positions.ctypes.data
        step.slots_stride = len(layout.token_ids)
        step.slots, step.logits_indices = layout.slots.ctypes.data, indices.ctypes.data
        step.rows, step.query_starts = layout.rows.ctypes.data, layout.query_starts.ctypes.data
        step.context_lens = layout.context_lens.ctypes.data
        step.prompts, step.logits_prompts = spans(bounds), spans(logits_bounds)

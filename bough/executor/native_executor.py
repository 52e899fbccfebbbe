"""The executor for CPUs with native kernels: a step is one call into the compiled library, then sampling.

Owns the rows and the sampling state, as `torch_executor` does; the forward pass is a tape. `threaded` wraps it.

CPUs with matrix tiles multiply the tokens of prompts in another way than the rest. What a token is decides, not how
many there are in a step, so each gets the same bits in any batch and any chunk. Deterministic inference also promises
the same bits for an output that comes back as part of a prompt: then all tokens are multiplied alike.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from bough.core.control import Command, CommandResult
from bough.core.plan import BatchPlan, BoolArray, FloatArray, Limits, RowSetup, StepResult
from bough.executor.control import ModelControl
from bough.executor.encoder import Encoder
from bough.executor.layout import LongArray, StepLayout, has_drafts, sampled_tokens
from bough.executor.native_sampling import NativeSampler
from bough.executor.native_tapes import NativeTapes
from bough.executor.pooling import Pooler
from bough.executor.threaded import StepMasks
from bough.executor.verification import HostRows, Inputs, prompt_logprobs
from bough.native.tape import Spans, Step

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


class Marks(NamedTuple):
    """What tokens are: which of them are of prompts, and the slots of their adapters."""

    prompts: BoolArray
    slots: LongArray

    def at(self, which: slice | LongArray) -> "Marks":
        return Marks(self.prompts[which], self.slots[which])


def bounds_of(marks: BoolArray) -> LongArray:
    """Where spans begin and end that are by turns not marked and marked; the first may be empty."""
    if not marks.any():
        return NO_SPANS
    changes = np.flatnonzero(np.diff(marks, prepend=False))
    return np.concatenate(([0], changes, [len(marks)])).astype(np.int64)


def spans(bounds: LongArray) -> Spans:
    """As the library takes them; the bounds must outlive the result."""
    return Spans(bounds.ctypes.data, len(bounds) - 1)


def address_of(slots: LongArray) -> int | None:
    """As the library takes those of adapters; they must outlive the run."""
    return slots.ctypes.data if slots.any() else None


class NativeExecutor:
    """Runs plans on the calling thread and those of a thread pool."""

    def __init__(
        self, tapes: NativeTapes, limits: Limits, control: ModelControl, encoder: Encoder | None, deterministic: bool
    ) -> None:
        self._tapes, self._encoder = tapes, encoder
        self._limits, self._control = limits, control
        self._rows = HostRows(limits)
        self._pooler = Pooler(tapes.model)
        self._prompts = PromptLengths(limits, one_way=deterministic)
        self._sample = NativeSampler(self._rows.sampling, tapes.thread_pool)
        pages = self._rows.mirror.pages
        self._step = Step(
            page_table=pages.ctypes.data,
            page_table_stride=pages[0].size,
            page_table_width=pages.shape[2],
            page_size=limits.page_size,
        )

    def limits(self) -> Limits:
        return self._limits

    def control(self, command: Command) -> CommandResult:
        return self._control.run(command)

    def run(self, plan: BatchPlan, masks: StepMasks) -> StepResult:
        self._prompts.set_up(plan.setups)
        self._pooler.set_up(plan.setups)
        plan = self._rows.align(plan)
        layout = self._rows.apply(plan)
        marks = Marks(self._prompts.marks(layout), layout.adapters)
        indices = sampled_tokens(plan, layout.query_starts) if plan.sample.any() else np.zeros(0, dtype=np.int64)
        inputs: Inputs = {}
        vectors: dict[int, FloatArray] = {}
        media = None if self._encoder is None else self._encoder.run(plan, layout)
        self._step.media = None if media is None else media.rows.data_ptr()
        self._step.is_media = None if media is None else media.here.data_ptr()
        pooled = self._pooler.wanted(plan)
        self._pooler.place_types(plan, layout)
        if plan.input_logprobs or pooled or has_drafts(plan):  # of each row more than its last token is asked for
            hidden = self._forward_whole(layout, marks)
            if pooled:
                vectors = self._pooler.pool(plan, layout, hidden)
            starts, sampling = layout.query_starts, self._rows.sampling
            inputs = prompt_logprobs(plan, sampling, hidden, starts, lambda at: self._logits_of(marks.at(at)))
            logits = self._logits(hidden[torch.from_numpy(indices)], marks.at(indices))
        else:
            logits = self._forward(layout, indices, marks)
        sampled = self._rows.finish(plan, logits, self._sample, masks)
        result = sampled.result(plan, logits, self._rows.sampling, inputs, vectors)
        if self._encoder is not None and plan.encodes:
            return replace(result, not_encoded=self._encoder.take_failed())
        return result

    def _forward(self, layout: StepLayout, indices: LongArray, marks: Marks) -> torch.Tensor:
        """The logits of the tokens at `indices`, until the next step: the first lines of what is returned."""
        self._describe(layout, indices, marks)
        self._tapes.run(self._tapes.last_tokens, self._step)
        return self._tapes.last_tokens.result

    def _forward_whole(self, layout: StepLayout, marks: Marks) -> torch.Tensor:
        """The hidden states of all tokens, until the next step."""
        self._describe(layout, np.zeros(0, dtype=np.int64), marks)
        self._tapes.run(self._tapes.all_tokens, self._step)
        return self._tapes.all_tokens.result[: len(layout.token_ids)]

    def _logits(self, hidden: torch.Tensor, marks: Marks) -> torch.Tensor:
        """The logits of some tokens' hidden states, at most as many as there are rows; until the next call."""
        recorded = self._tapes.logits
        assert recorded.input is not None
        recorded.input[: len(hidden)] = hidden
        bounds = bounds_of(marks.prompts)
        step = Step(logits_count=len(hidden), logits_prompts=spans(bounds), logits_adapters=address_of(marks.slots))
        self._tapes.run(recorded, step)
        return recorded.result[: len(hidden)]

    def _logits_of(self, marks: Marks) -> Callable[[torch.Tensor], torch.Tensor]:
        """The logits of these tokens' hidden states, asked for one block of them after the other."""

        def logits_of(block: torch.Tensor) -> torch.Tensor:
            nonlocal marks
            of_block, marks = marks.at(slice(len(block))), marks.at(slice(len(block), None))
            return self._logits(block, of_block)

        return logits_of

    def _describe(self, layout: StepLayout, indices: LongArray, marks: Marks) -> None:
        """Points the step at these arrays, which outlive the run."""
        step, ends = self._step, marks.at(indices)
        bounds, logits_bounds = bounds_of(marks.prompts), bounds_of(ends.prompts)
        self._described = layout, indices, bounds, logits_bounds, ends
        step.tokens, step.batch, step.logits_count = len(layout.token_ids), len(layout.rows), len(indices)
        step.token_ids, step.positions = layout.token_ids.ctypes.data, layout.positions.ctypes.data
        step.slots_stride = len(layout.token_ids)
        step.slots, step.logits_indices = layout.slots.ctypes.data, indices.ctypes.data
        step.rows, step.query_starts = layout.rows.ctypes.data, layout.query_starts.ctypes.data
        step.context_lens = layout.context_lens.ctypes.data
        step.common = None if layout.common is None else layout.common.ctypes.data
        step.prompts, step.logits_prompts = spans(bounds), spans(logits_bounds)
        step.adapters, step.logits_adapters = address_of(marks.slots), address_of(ends.slots)

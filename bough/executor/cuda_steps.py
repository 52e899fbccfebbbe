"""Steps on a GPU as the scheduler holds them: their results in pinned memory, and when they were on the device.

Two timed events stand around every step and are read once it is done, each measured from the end of the step before:
the driver gives differences in single precision, exact only while they are short. That a step cannot begin before it
was queued, nor end after it was seen to be done, takes out what the two clocks drift apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from bough.core.plan import BatchPlan, InFlight, PositionLogprobs, StepResult
from bough.executor.verification import Inputs, Vectors, Verified
from bough.sampling.logprobs import PendingLogprobs

Follow = Callable[[Verified], None]  # takes what a step's rows have sampled


class Beside(NamedTuple):
    """What a step gives beside samples, by place in the plan; it is on its way to the host."""

    logprobs: Inputs  # of prompts
    vectors: Vectors


NOTHING_BESIDE = Beside({}, {})


class StepPlacement:
    """Owns the end of the last step in host time. Steps come in the order in which they ran."""

    def __init__(self, zero: float) -> None:
        self._last_end = zero

    def place(self, gap_s: float, duration_s: float, queued_at: float, seen_at: float) -> tuple[float, float]:
        """Start and end of a step that began `gap_s` after the end of the one before."""
        start = max(self._last_end + gap_s, queued_at)
        end = start + duration_s
        if end > seen_at:
            end = seen_at
            start = max(end - duration_s, self._last_end)
        self._last_end = end
        return start, end


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The events around one step."""

    clock: DeviceClock
    begun: torch.cuda.Event
    done: torch.cuda.Event
    queued_at: float
    encoded: torch.cuda.Event | None = None  # behind its encoders, which come first
    not_encoded: tuple[int, ...] = ()

    def ready(self) -> bool:
        return bool(self.done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[float, float]:
        """Waits until the step is done; when it was on the device."""
        self.done.synchronize()
        return self.clock.read(self)

    def tell(self, result: StepResult) -> StepResult:
        """The result with what became of encoders."""
        if self.encoded is None:
            return result
        encode_s = 1e-3 * self.begun.elapsed_time(self.encoded)
        return replace(result, encode_s=encode_s, not_encoded=self.not_encoded)


class DeviceClock:
    """Owns the event that the next step is measured from. `start` and `stop` stand around the launch of each step."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()  # the only one there is; to ask for it each time takes a while
        self._begun, self._queued_at = self._record(), time.monotonic()
        self._last_done = self._record()
        self._last_done.synchronize()
        self._placement = StepPlacement(time.monotonic())
        self._encoded: tuple[torch.cuda.Event | None, tuple[int, ...]] = (None, ())

    def start(self) -> None:
        """Comes before anything of the step is queued."""
        self._queued_at = time.monotonic()
        self._begun = self._record()

    def encoded(self, failed: tuple[int, ...]) -> None:
        """Comes after what the step's encoders do is queued."""
        self._encoded = self._record(), failed

    def stop(self) -> TimedStep:
        """Comes after everything of the step is queued."""
        encoded, self._encoded = self._encoded, (None, ())
        return TimedStep(self, self._begun, self._record(), self._queued_at, *encoded)

    def read(self, step: TimedStep) -> tuple[float, float]:
        """Start and end of a step that is done, in the host's time; each step once, in order."""
        seen_at = time.monotonic()
        gap_s = 1e-3 * self._last_done.elapsed_time(step.begun)
        duration_s = 1e-3 * step.begun.elapsed_time(step.done)
        self._last_done = step.done
        return self._placement.place(gap_s, duration_s, step.queued_at, seen_at)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step on the device; its results are in pinned memory once `done` has happened."""

    plan: BatchPlan
    done: TimedStep
    tokens: torch.Tensor | None  # [sampled, or more] int64, pinned; -1 where the logits were not finite
    output_logprobs: PendingLogprobs | None
    beside: Beside = NOTHING_BESIDE

    def ready(self) -> bool:
        return self.done.ready()

    def wait(self) -> StepResult:
        span = self.done.wait()
        plan, vectors = self.plan, self.beside.vectors
        inputs = {index: scores.to_host() for index, scores in self.beside.logprobs.items()}
        if self.tokens is None:
            return self.done.tell(replace(StepResult.without_tokens(plan.step, inputs, span), vectors=vectors))
        sampled = np.count_nonzero(plan.sample)
        tokens = self.tokens.numpy()[:sampled].astype(np.int32)
        bad = tokens < 0
        tokens[bad] = 0
        outputs: dict[int, PositionLogprobs] = {}
        if self.output_logprobs is not None:
            places = np.flatnonzero(plan.sample).tolist()
            found = zip(places, self.output_logprobs.read(), strict=True)
            outputs = {place: run for place, run in found if run is not None}
        counts = np.ones(sampled, dtype=np.int32)
        result = StepResult(plan.step, tokens.reshape(-1, 1), counts, bad, outputs, inputs, span, vectors=vectors)
        return self.done.tell(result)


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """A step whose drafts were verified: the host has read its result."""

    done: TimedStep
    result: StepResult

    def ready(self) -> bool:
        return self.done.ready()

    def wait(self) -> StepResult:
        return self.done.tell(replace(self.result, device_span=self.done.wait()))


@dataclass(frozen=True, slots=True)
class MaskedStep:
    """A step up to its logits, which wait for masks; `rest` is the whole of it once they have come. Of a pipeline's
    last stage, another thread waits for it."""

    plan: BatchPlan
    logits: torch.Tensor  # [sampled, vocabulary]
    beside: Beside
    follow: Follow | None = None  # the rest of the step of a draft model
    rest: Future[InFlight] = field(default_factory=Future)

    def ready(self) -> bool:
        return self.rest.done() and self.rest.result().ready()

    def wait(self) -> StepResult:
        return self.rest.result().wait()

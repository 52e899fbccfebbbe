"""Steps on a GPU, as the scheduler holds them: their results lie in pinned memory once the device has come there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bough.core.plan import BatchPlan, PositionLogprobs, StepResult
from bough.executor.device_clock import TimedStep
from bough.sampling.logprobs import PendingLogprobs, Scores


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step on the device; its results are in pinned memory once `done` has happened."""

    plan: BatchPlan
    done: TimedStep
    tokens: torch.Tensor | None  # [sampled, or more] int64, pinned; -1 where the logits were not finite
    output_logprobs: PendingLogprobs | None
    input_logprobs: dict[int, Scores]

    def ready(self) -> bool:
        return self.done.ready()

    def wait(self) -> StepResult:
        span = self.done.wait()
        plan = self.plan
        inputs = {index: scores.to_host() for index, scores in self.input_logprobs.items()}
        if self.tokens is None:
            none = np.zeros(0, dtype=np.int32)
            return StepResult(plan.step, none.reshape(0, 1), none, none.astype(np.bool_), {}, inputs, span)
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
        return StepResult(plan.step, tokens.reshape(-1, 1), counts, bad, outputs, inputs, span)


@dataclass(slots=True)
class MaskedStep:
    """A step up to its logits, which wait for masks; `rest` is the whole of it once they have come."""

    plan: BatchPlan
    logits: torch.Tensor  # [sampled, vocabulary]
    rows: torch.Tensor  # [sampled]
    input_logprobs: dict[int, Scores]
    rest: CudaStep | None = None

    def ready(self) -> bool:
        return self.rest is not None and self.rest.ready()

    def wait(self) -> StepResult:
        assert self.rest is not None, f"step {self.plan.step} still waits for its masks"
        return self.rest.wait()

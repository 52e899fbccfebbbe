"""What a step on a GPU tells once it is done, without a GPU: its tokens lie in memory as the device leaves them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bough.core.plan import StepResult
from bough.executor.cuda_steps import CudaStep
from bough.executor.plain_plans import decode_plan


class Done:
    """A step that has ended."""

    def ready(self) -> bool:
        return True

    def wait(self) -> tuple[float, float]:
        return 1.0, 2.0

    def tell(self, result: StepResult) -> StepResult:
        return result


def step_of(tokens: list[int] | None, sample: list[bool]) -> CudaStep:
    plan = replace(decode_plan(7, len(sample)), sample=np.array(sample))
    done: Any = Done()
    return CudaStep(plan, done, None if tokens is None else torch.tensor(tokens), None)


def test_padding_behind_the_tokens_is_left_out_and_bad_ones_are_marked() -> None:
    result = step_of([5, -1, 9, 3, 3], [True, True, True]).wait()
    assert result.tokens.tolist() == [[5], [0], [9]]
    assert result.bad.tolist() == [False, True, False]
    assert result.counts.tolist() == [1, 1, 1]
    assert result.device_span == (1.0, 2.0)


def test_only_rows_that_sample_have_tokens() -> None:
    assert step_of([4, 6], [True, False, True]).wait().tokens.tolist() == [[4], [6]]
    assert step_of(None, [False, False]).wait().tokens.shape == (0, 1)

"""Which tokens of a step are of prompts."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.plan import Limits, RowSetup
from bough.core.sampling_params import SamplingParams
from bough.executor.layout import RowMirror
from bough.executor.native_executor import PromptLengths, bounds_of
from bough.executor.plain_plans import decode_plan, prompt_plan


@pytest.mark.parametrize(
    ("marks", "bounds"),
    [("", [0]), ("...", [0]), ("xx", [0, 0, 2]), ("..xxx", [0, 2, 5]), ("x.xx.", [0, 0, 1, 2, 4, 5])],
)
def test_spans_take_turns_and_begin_unmarked(marks: str, bounds: list[int]) -> None:
    assert bounds_of(np.array([mark == "x" for mark in marks], dtype=np.bool_)).tolist() == bounds


def test_outputs_that_are_computed_anew_are_no_prompt() -> None:
    limits = Limits(4, 1, (64,), 32, 100, 16, "test")
    mirror, prompts = RowMirror(limits), PromptLengths(limits)
    plan = prompt_plan(0, np.arange(5, dtype=np.int32), np.arange(1, 9, dtype=np.int32))
    (setup,) = plan.setups
    resumed = RowSetup(0, SamplingParams(), 0, setup.pages, 0, 2, None, 3, None, ())
    prompts.set_up((resumed,))
    assert prompts.marks(mirror.apply(plan)).tolist() == [True] * 3 + [False] * 2
    assert prompts.marks(mirror.apply(decode_plan(1, 1))).tolist() == [False]

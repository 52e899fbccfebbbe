"""One greedy request on an executor, without a scheduler."""

from __future__ import annotations

import numpy as np

from bough.core.plan import BatchPlan, Executor, RowSetup
from bough.core.sampling_params import SamplingParams
from bough.executor.plain_plans import decode_plan, prompt_plan

PROMPT = [5, 9, 17, 33, 2, 64, 90]


def tokens_of(executor: Executor, count: int = 6) -> list[int]:
    """Greedy tokens after the prompt, on pages from 1 on."""
    size = executor.limits().page_size
    pages = np.arange(1, 1 + 32 // size, dtype=np.int32)
    steps = [prompt_plan(0, np.array(PROMPT, dtype=np.int32), pages), *(decode_plan(i, 1) for i in range(1, count))]
    return [int(executor.launch(step).wait().tokens[0, 0]) for step in steps]


def go_on(executor: Executor, last: int, pages: np.ndarray, length: int, count: int = 6) -> list[int]:
    """Greedy tokens behind `length` tokens that the pages hold, from the token `last` on."""
    none = np.zeros(0, dtype=np.int32)
    setup = RowSetup(
        row=1,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        pages=(pages,),
        length=length,
        generated=1,
        history=None,
        prompt_len=length,
        logprobs=None,
        stop_ids=(),
    )
    one, rows = np.ones(1, dtype=np.int32), np.ones(1, dtype=np.int32)
    first = BatchPlan(9, (setup,), (), rows, one, one, one * last, (none,), (one * 0,), np.ones(1, dtype=np.bool_))
    found = [int(executor.launch(first).wait().tokens[0, 0])]
    for step in range(count - 1):
        plan = BatchPlan(10 + step, (), (), rows, one, one * 0, none, (none,), (one * 0,), np.ones(1, dtype=np.bool_))
        found.append(int(executor.launch(plan).wait().tokens[0, 0]))
    return found

"""Plans made by hand, without a scheduler: for rehearsals and for benchmarks of the executor alone."""

from __future__ import annotations

import numpy as np

from bough.core.plan import BatchPlan, IntArray, RowSetup
from bough.core.sampling_params import SamplingParams


def prompt_plan(row: int, tokens: IntArray, pages: IntArray) -> BatchPlan:
    """A whole prompt on a fresh row, which gets these pages for good."""
    none = np.zeros(0, dtype=np.int32)
    setup = RowSetup(row, SamplingParams(temperature=0.0), 0, (none,), 0, 0, None, len(tokens), None, ())
    count = np.array([len(tokens)], dtype=np.int32)
    return BatchPlan(
        step=0,
        setups=(setup,),
        edits=(),
        rows=np.array([row], dtype=np.int32),
        query_lens=count,
        given=count,
        tokens=tokens,
        new_pages=(pages,),
        new_page_counts=(np.array([len(pages)], dtype=np.int32),),
        sample=np.array([True]),
    )


def decode_plan(step: int, batch: int) -> BatchPlan:
    """A token each for the first rows, on pages that they have."""
    zeros = np.zeros(batch, dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)
    return BatchPlan(
        step=step,
        setups=(),
        edits=(),
        rows=np.arange(batch, dtype=np.int32),
        query_lens=zeros + 1,
        given=zeros,
        tokens=none,
        new_pages=(none,),
        new_page_counts=(zeros,),
        sample=np.ones(batch, dtype=np.bool_),
    )

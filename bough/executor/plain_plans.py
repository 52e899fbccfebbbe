"""Steps made by hand, without a scheduler: for rehearsals, warm-ups and benchmarks of the executor alone."""

from collections.abc import Sequence

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.attention.context import ForwardContext
from bough.core.model_config import FULL_ATTENTION, KVGroup
from bough.core.plan import BatchPlan, IntArray, Limits, RowSetup
from bough.core.sampling_params import SamplingParams
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM


def prompt_plan(
    row: int,
    tokens: IntArray,
    pages: IntArray,
    group_pages: Sequence[int] = (),
    groups: Sequence[KVGroup] = (FULL_ATTENTION,),
) -> BatchPlan:
    """A whole prompt on a fresh row, which gets these pages for good; of KV groups with `group_pages`
    the same, counted again from the first where there are fewer. Where the last of `groups` is of states, the row's is
    in the page of its number."""
    none = np.zeros(0, dtype=np.int32)
    new_pages = [(pages - 1) % most + 1 for most in group_pages] or [pages]
    counts, held = [len(pages)] * len(new_pages), [none] * len(new_pages)
    if groups[-1].kind == "state":
        new_pages[-1], counts[-1], held[-1] = none, 0, np.array([1 + row, 0], dtype=np.int32)
    setup = RowSetup(row, SamplingParams(temperature=0.0), 0, tuple(held), 0, 0, None, len(tokens), None, ())
    count = np.array([len(tokens)], dtype=np.int32)
    return BatchPlan(
        step=0,
        setups=(setup,),
        edits=(),
        rows=np.array([row], dtype=np.int32),
        query_lens=count,
        given=count,
        tokens=tokens,
        new_pages=tuple(new_pages),
        new_page_counts=tuple(np.array([number], dtype=np.int32) for number in counts),
        sample=np.array([True]),
    )


def decode_plan(step: int, batch: int, groups: int = 1) -> BatchPlan:
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
        new_pages=(none,) * groups,
        new_page_counts=(zeros,) * groups,
        sample=np.ones(batch, dtype=np.bool_),
    )


def run_padding(
    model: CausalLM, attention: AttentionBackend, pool: KVPool, limits: Limits, tokens: int = 1, rows: int = 1
) -> None:
    """A step of so many tokens of nobody."""
    device, groups = pool.keys[0].device, len(limits.pages)
    batch = padding_batch(tokens, limits.context_length, limits.page_size, device, groups, rows)
    attention.prepare(batch)
    model.forward(torch.zeros_like(batch.positions), ForwardContext(attention, pool, batch))


def padding_batch(
    tokens: int, context_length: int, page_size: int, device: torch.device, groups: int = 1, rows: int = 1
) -> AttentionBatch:
    """One row of so many new tokens, all of which are written to page 0 of each group, that no request is given; or
    several, of as many tokens each, behind as many as all of them have, which they share."""
    context, starts = 0 if rows == 1 else tokens, np.arange(rows + 1, dtype=np.int32) * (tokens // rows)
    return AttentionBatch(
        rows=torch.zeros(rows, dtype=torch.int32, device=device),
        lengths=torch.full((rows,), context + tokens // rows, dtype=torch.int32, device=device),
        decodes=0,
        query_lens=np.diff(starts),
        query_starts=starts,
        context_lens=np.full(rows, context, dtype=np.int32),
        common=np.full(rows, context, dtype=np.int32),
        page_tables=(torch.zeros((1, -(-2 * tokens // page_size)), dtype=torch.int32, device=device),) * groups,
        slots=(torch.zeros(tokens, dtype=torch.int64, device=device),) * groups,
        positions=torch.arange(tokens, device=device) % context_length,
        page_size=page_size,
        starts=torch.from_numpy(starts).to(device),
    )

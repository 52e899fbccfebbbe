"""Trees of drafts as attention takes them.

A node attends to its row's prefix and to the nodes that it follows. For that it is a decode with a page table of its
own, of pages of one token, so no kernel knows of trees.
"""

from __future__ import annotations

import numpy as np

from bough.attention.batch import AttentionBatch
from bough.attention.reading import ToDevice
from bough.core.plan import IntArray, positions_in_runs
from bough.executor.drafter import draft_places
from bough.executor.layout import StepLayout


def tree_batch(
    layout: StepLayout,
    parents: IntArray,  # of each draft, the place among its row's tokens that it follows
    pages: IntArray,  # [groups, rows, pages of a row]
    page_size: int,
    to_device: ToDevice,
    both_ways: IntArray | None,
) -> AttentionBatch:
    """The step as attention takes it: first every token of the decodes on its own, then the prompts."""
    decodes, groups = len(layout.from_device), np.arange(len(pages))[:, None, None]
    widths, count = layout.query_lens[:decodes], int(layout.query_starts[decodes])
    follows = np.full(count, -1, dtype=np.int64)
    follows[draft_places(layout)] = layout.query_starts[:decodes].repeat(widths - 1) + parents
    depths, at = np.zeros(count, dtype=np.int32), follows
    while (at >= 0).any():
        depths, at = depths + (at >= 0), np.where(at >= 0, follows[at], -1)
    times = np.concatenate((widths, np.ones(len(layout.rows) - decodes, dtype=np.int32)))
    rows, context = layout.rows.repeat(times), layout.context_lens.repeat(times)
    context[:count] += depths
    query_lens = np.concatenate((np.ones(count, dtype=np.int32), layout.query_lens[decodes:]))
    starts, lengths = np.concatenate(([0], query_lens.cumsum())).astype(np.int32), context + query_lens
    places = np.arange(int(lengths.max()))
    lines = pages[groups, rows[:, None], places // page_size] * page_size + (places % page_size).astype(np.int32)
    at = np.arange(count)
    for up in range(int(depths.max()) + 1):  # from each node on to those that it follows
        own = np.flatnonzero(at >= 0)
        lines[:, own, context[own] - up] = layout.slots[:, at[own]]
        at = np.where(at >= 0, follows[at], -1)
    rotary = layout.rotary.copy()
    rotary[..., :count] += depths - positions_in_runs(widths)
    return AttentionBatch(
        *(to_device(np.arange(len(rows), dtype=np.int32)), to_device(lengths)),
        *(count, query_lens, starts, context),
        page_tables=tuple(map(to_device, lines)),
        slots=tuple(to_device(layout.slots)),
        positions=to_device(rotary),
        page_size=1,
        starts=to_device(starts),
        both_ways=both_ways,
    )

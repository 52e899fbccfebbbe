"""Trees of drafts: how they grow, how they are computed, and how what holds of one becomes a chain.

Each level gives its likeliest nodes some children each, and the best nodes of all levels are verified. A node attends
to its row's prefix and to the nodes that it follows. For that it is a decode with a page table of its own, of pages of
one token, so no kernel knows of trees. Nodes stand in the row's next places in the order of their scores; those that
hold move to where a chain would have had them, and what follows need not know of trees either.
"""

from __future__ import annotations

import numpy as np
import torch

from bough.attention.batch import AttentionBatch, decodes_of
from bough.attention.reading import ToDevice
from bough.core.plan import BatchPlan, IntArray, positions_in_runs
from bough.executor.drafter import Drafter, Guessed, draft_places
from bough.executor.layout import LongArray, StepLayout


class TreeDrafter(Drafter):
    """What it computes of nodes is in pages behind those of the rows, and is lost after the guess."""

    def guess(
        self, plan: BatchPlan, layout: StepLayout, page_tables: tuple[torch.Tensor, ...], last: torch.Tensor
    ) -> Guessed:
        wanted, topk = plan.query_lens[: len(last)] - 1, self._topk
        live: LongArray = np.flatnonzero(wanted)
        most, count, beams = int(wanted.max()), len(live), len(live) * topk
        if self._model.ahead:
            rows = self._to_device(plan.rows[live].astype(np.int64))
            tokens, scores, hidden = self._first[rows], self._scores[rows], self._hidden[rows]
        else:
            first = self._column(layout, live, 0, page_tables)
            hidden, with_ = self._advance(last[self._to_device(live)], None, first)
            tokens, scores = self._best(hidden, with_)
        context = layout.context_lens[live].repeat(topk) + (not self._model.ahead)  # of each beam
        levels = min(self._levels, most)
        lines = self._prefixes(page_tables[0], plan.rows[live], int(context.max()) + levels).repeat_interleave(topk, 0)
        begin, numbers = self._to_device(context.astype(np.int64)), torch.arange(beams, device=last.device)
        path, hidden = lines[:, :0], hidden.repeat_interleave(topk, 0)
        nodes = torch.arange(topk, device=last.device).expand(count, topk)  # the beams' places among all nodes
        found = [(tokens, scores, torch.full_like(tokens, -1))]  # and the nodes that they follow
        for level in range(1, levels):
            own = self._scratch + (level - 1) * beams + numbers
            path = torch.cat((path, own[:, None].int()), 1)
            lines.scatter_(1, begin[:, None] + numbers.new_tensor(range(level)), path)
            # A beam that its row has no place for is not chosen in the end.
            at = np.minimum(context + level - 1, self._last_place).astype(np.int32)
            places = self._to_device(at + 1), self._to_device(at.astype(np.int64)), (own,)
            batch = decodes_of(numbers.int(), *places, (lines,), 1, at)
            hidden, with_ = self._advance(tokens.flatten(), hidden, batch)
            further, chances = self._best(hidden, with_)
            further, totals = further.view(count, -1), (scores.reshape(beams, 1) + chances).view(count, -1)
            found.append((further, totals, nodes.repeat_interleave(topk, 1)))
            scores, best = totals.topk(topk)
            nodes, tokens = best + topk + (level - 1) * topk * topk, further.gather(1, best)
            origin = (best // topk + numbers.view(count, topk)[:, :1]).flatten()
            hidden, path = hidden[origin], path[origin]
        tokens, totals, follows = (torch.cat(part, 1) for part in zip(*found, strict=True))
        # No node scores better than the one that it follows, and of equals the earlier comes first: parents do.
        order = totals.argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(1) + 1
        order = order[:, :most]
        follows = follows.gather(1, order)
        parents = torch.where(follows < 0, 0, rank.gather(1, follows.clamp_min(0)))
        chosen = torch.stack((tokens.gather(1, order), parents)).cpu().numpy()[:, np.arange(most) < wanted[live, None]]
        return Guessed(self._to_device(np.ascontiguousarray(chosen[0])), chosen[1].astype(np.int32))

    def _prefixes(self, table: torch.Tensor, rows: IntArray, length: int) -> torch.Tensor:
        """The slots of the rows' first tokens. [rows, length] int32"""
        size, at = self._page_size, torch.arange(length, device=table.device)
        pages = table[self._to_device(rows.astype(np.int64))[:, None], (at // size).clamp_max(table.shape[1] - 1)]
        return pages * size + (at % size).int()


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

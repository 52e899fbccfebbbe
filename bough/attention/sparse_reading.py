"""Which tokens the queries of a step attend to where attention is sparse, by torch: pure functions of its reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bough.attention.base import IndexQueries
from bough.attention.reading import DecodeRead, PrefillRead, Reads
from bough.kernels.sparse_index.reference import choose, index_scores

MAX_SCORES = 1 << 26  # of single heads that exist at once, unless one query has more

# Of the groups of decodes, then of the other rows: the places of the chosen keys among those that are read, for each
# query [queries, top] int64. None: there are no more keys than a query attends to.
Choices = Sequence[torch.Tensor | None]


def choose_tokens(index: IndexQueries, reads: Reads, cache: torch.Tensor, top: int) -> Choices:
    """By the index keys in `cache` [slots, head_dim]."""
    decodes = [_choose_for_decodes(index, group, cache[group.index], top) for group in reads.decodes]
    return decodes + [_choose_for_row(index, row, cache[row.index], top) for row in reads.prefills]


def _choose_for_decodes(index: IndexQueries, group: DecodeRead, keys: torch.Tensor, top: int) -> torch.Tensor | None:
    keys = keys.view(group.rows, -1, keys.shape[-1])
    if keys.shape[1] <= top:
        return None
    scores = index_scores(index.q[group.tokens, None], index.weights[group.tokens, None], keys)[:, 0]
    if group.mask is not None:
        scores += group.mask[:, 0, 0]
    return choose(scores, top)


def _choose_for_row(index: IndexQueries, row: PrefillRead, keys: torch.Tensor, top: int) -> torch.Tensor | None:
    if len(keys) <= top:
        return None
    place, chosen = torch.arange(len(keys), device=keys.device), []
    size = max(1, MAX_SCORES // (index.q.shape[1] * len(keys)))
    for first in range(row.first_token, row.last_token, size):
        part = slice(first, min(first + size, row.last_token))
        scores = index_scores(*index.cut(part), keys)
        own = place[part.start - row.last_token :][: len(scores), None]
        chosen.append(choose(scores.masked_fill_(place > own, float("-inf")), top))
    return torch.cat(chosen)

"""Who may start: the token budget of a step, and how many future tokens to reserve for those that run.

Reserving every request's `max_new_tokens` would leave most memory idle, because most stop early; reserving nothing
would lead to retractions. The new-token ratio is the share that is reserved: it falls while decoding goes well and
jumps after a retraction. The numbers are SGLang's.
"""

from __future__ import annotations

import numpy as np

from bough.core.plan import IntArray
from bough.scheduler.prefix_cache import pages_for
from bough.scheduler.request import Request
from bough.scheduler.rows import Phase
from bough.scheduler.running_batch import RunningBatch

INITIAL = 0.7
LOWEST_SHARE = 0.14  # of the initial ratio
DECAY_STEPS = 600
HEADROOM_TOKENS = 20  # per request, after a retraction
CLIPPED_NEW_TOKENS = 4096  # nobody's future counts for more than this


class NewTokenRatio:
    """Owns the one adaptive number of admission."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL * conservativeness, 1.0)
        self._lowest = self._initial * LOWEST_SHARE
        self.value = self._initial

    def after_decode(self) -> None:
        self.value = max(self._lowest, self.value - (self._initial - self._lowest) / DECAY_STEPS)

    def after_retraction(self, generated: int, max_new: int, requests: int) -> None:
        """From what the remaining requests have generated of what they may, with some headroom."""
        self.value = min(1.0, (generated + HEADROOM_TOKENS * requests) / (max_new + 1))

    def reset(self) -> None:
        self.value = self._initial


def reserved_pages(
    remaining_prompt: IntArray, remaining_output: IntArray, tail_room: IntArray, ratio: float, page_size: int
) -> int:
    """Pages that running requests are expected to take yet. `tail_room`: unused places in each row's last page."""
    future = remaining_prompt + np.minimum(remaining_output, CLIPPED_NEW_TOKENS) * ratio - tail_room
    return int(np.ceil(np.maximum(future, 0.0) / page_size).sum())


def prefill_budget(chunk_tokens: int, max_prefill_tokens: int, page_size: int) -> int:
    """Most prompt tokens in one step. Never less than a page, because unfinished prompts grow by whole pages and would
    stand still; that `chunk_tokens` holds one, or the longest prompt, is the executor's part."""
    return min(chunk_tokens, max(max_prefill_tokens, page_size))


class Forecast:
    """Compares what a request will need with what those that run leave over. Owns the ratio; counts are in pages."""

    def __init__(self, batch: RunningBatch, conservativeness: float) -> None:
        self._table = batch.table
        self._cache = batch.cache
        self.ratio = NewTokenRatio(conservativeness)

    def need(self, request: Request) -> int:
        """What a waiting request takes if nothing of it is cached."""
        future = min(request.max_new - request.generated, CLIPPED_NEW_TOKENS)
        return pages_for(len(request.tokens) + future, self._cache.page_size)

    def room(self) -> int:
        """What is left when those that run have had their share."""
        table = self._table
        rows = np.flatnonzero(table.phase != Phase.FREE)
        return self._cache.available - reserved_pages(
            np.maximum(table.known[rows] - table.length[rows], 0),
            table.max_new[rows] - table.sampled[rows],
            table.page_count[rows] * table.page_size - table.length[rows],
            self.ratio.value,
            table.page_size,
        )

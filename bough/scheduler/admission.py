"""Who may start: the token budget of a step, and how many future tokens to reserve for those that run.

Reserving every request's `max_new_tokens` would leave most memory idle, because most stop early; reserving nothing
would lead to retractions. The new-token ratio is the share that is reserved: it falls while decoding goes well and
jumps after a retraction. The numbers are SGLang's.
"""

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
) -> IntArray:
    """Pages that each running request is expected to take yet. `tail_room`: unused places in each row's last page."""
    future = remaining_prompt + np.minimum(remaining_output, CLIPPED_NEW_TOKENS) * ratio - tail_room
    pages: IntArray = np.ceil(np.maximum(future, 0.0) / page_size).astype(np.int32)
    return pages


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
        self._at_most = 0  # pages that those that run, and the last one asked for, are expected to take yet

    def fits(self, request: Request, cached: int = 0, unlocked: int = 0, *, another: bool = False) -> bool:
        """Whether a waiting request, of which so many tokens are cached and locked, fits beside those that run. Of the
        cached ones so many pages are `unlocked` as yet. `another`: since the last call only what did fit has begun."""
        cache, size = self._cache, self._cache.page_size
        pages, prefix, available = self._pages(request), cached // size, cache.available - unlocked
        if not another or self._at_most + pages - prefix > available:
            self._at_most = available - self._room(available)
        self._at_most += pages - prefix
        if self._at_most > available:
            return False
        windows = [(i, group) for i, group in enumerate(cache.groups) if not group.is_state]
        # A window group keeps a bounded number of pages for a row, however long it becomes.
        return all(
            min(pages, group.row_pages) - min(prefix, group.row_pages) <= self._room(group.available, i)
            for i, group in windows
        )

    def wanted(self, head: Request | None) -> int:
        """Pages that the next steps take: one for each row, and what the oldest waiting request may need in all."""
        return self._table.running + (0 if head is None else self._pages(head))

    def _pages(self, request: Request) -> int:
        future = min(request.max_new - request.generated, CLIPPED_NEW_TOKENS)
        return pages_for(len(request.tokens) + future, self._cache.page_size)

    def _room(self, available: int, window: int | None = None) -> int:
        """What is left of the pages of full attention, or of a window group, when those that run have had their
        share."""
        table = self._table
        rows = np.flatnonzero(table.phase != Phase.FREE)
        future = reserved_pages(
            np.maximum(table.known[rows] - table.length[rows], 0),
            table.max_new[rows] - table.sampled[rows],
            table.page_count[rows] * table.page_size - table.length[rows],
            self.ratio.value,
            table.page_size,
        )
        if window is not None:
            held = table.page_count[rows] - table.group_first[window][rows]
            future = np.minimum(future, np.maximum(self._cache.groups[window].row_pages - held, 0))
        return available - int(future.sum())

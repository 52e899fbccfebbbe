"""How many future tokens to reserve for running requests: the new-token ratio.

Reserving every request's `max_new_tokens` would leave most memory idle, because most stop early; reserving nothing
would lead to retractions. The ratio is the share that is reserved: it falls while decoding goes well and jumps after a
retraction. The numbers are SGLang's.
"""

from __future__ import annotations

import numpy as np

from bough.core.plan import IntArray

INITIAL = 0.7
LOWEST_SHARE = 0.14  # of the initial ratio
DECAY_STEPS = 600
HEADROOM_TOKENS = 20  # per request, after a retraction
FORESIGHT_TOKENS = 4096  # nobody's future counts for more than this


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
    future = remaining_prompt + np.minimum(remaining_output, FORESIGHT_TOKENS) * ratio - tail_room
    return int(np.ceil(np.maximum(future, 0.0) / page_size).sum())

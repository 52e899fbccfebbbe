"""Drafts by looking for what followed the same tokens before: in the request itself, and in requests that have ended.

The search is a few numpy comparisons over the tokens: there is no index to keep, and requests that never repeat
anything cost nothing but those.
"""

from collections import OrderedDict

import numpy as np

from bough.core.plan import IntArray
from bough.core.settings import SpeculativeSettings

NO_TOKENS: IntArray = np.zeros(0, dtype=np.int32)
FEW = 64  # places
LEAST_MATCH = 2  # tokens: what followed a single one says little; in other requests, what followed two


class NgramProposer:
    """Owns the tokens of ended requests, up to a capacity, apart for each namespace."""

    def __init__(self, settings: SpeculativeSettings) -> None:
        self.most = settings.most_drafts
        self.adaptive = settings.speculative_adaptive
        self._depth = settings.speculative_ngram_max_trie_depth
        self._capacity = settings.speculative_ngram_capacity
        self._ended: OrderedDict[str, IntArray] = OrderedDict()  # by namespace, the one used last at the end
        self._size = 0

    def propose(self, known: IntArray, namespace: str, count: int) -> tuple[IntArray, int]:
        matched, end = longest_match(known[:-1], known, self._depth)
        elsewhere, at, seen = 0, 0, self._ended.get(namespace, NO_TOKENS)
        if matched < self._depth:
            elsewhere, at = longest_match(seen, known, self._depth)
        if elsewhere > max(matched, LEAST_MATCH):
            return seen[at : at + count], elsewhere
        if matched < LEAST_MATCH:
            return NO_TOKENS, 0
        # What is copied may run on into itself: a text that repeats every p tokens goes on doing so.
        return known[end + np.arange(count) % (len(known) - end)], matched

    def learn(self, tokens: IntArray, namespace: str) -> None:
        if not self._capacity:
            return
        before = self._ended.pop(namespace, NO_TOKENS)
        kept = np.concatenate([before, tokens])[-self._capacity :]
        self._ended[namespace] = kept
        self._size += len(kept) - len(before)
        while self._size > self._capacity:
            _, dropped = self._ended.popitem(last=False)
            self._size -= len(dropped)


def longest_match(tokens: IntArray, known: IntArray, depth: int) -> tuple[int, int]:
    """How many of the last `known` tokens, up to `depth`, stand somewhere in `tokens`, and where the last such place
    ends."""
    last = known[: -1 - depth : -1]
    ends = np.flatnonzero(tokens == last[0]) + 1
    if not len(ends):
        return 0, 0
    for j in range(1, len(last)):  # many places are compared token by token, few all at once
        if len(ends) <= FEW:
            break
        further = ends[(ends > j) & (tokens[ends - 1 - j] == last[j])]
        if not len(further):
            return j, int(ends[-1])
        ends = further
    else:
        return len(last), int(ends[-1])
    at = ends[:, None] - 1 - np.arange(len(last))
    differ = (at < 0) | (tokens[np.maximum(at, 0)] != last)
    matched = np.where(differ.any(1), differ.argmax(1), len(last))
    best = len(ends) - 1 - int(matched[::-1].argmax())
    return int(matched[best]), int(ends[best])

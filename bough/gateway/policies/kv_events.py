"""Routes a request to the worker that holds most of its prompt, as the workers themselves announce it.

Three sources, the surest first. The block indexes say what each publishing worker has cached, to the token, evictions
included; they need token ids, which come with the request or are found in the book of earlier prompts. What was sent
within the last seconds may be cached before the event of it has arrived, so it counts as cached. And where ids are not
known, or for workers that publish nothing, the tree of sent texts decides as in `cache_aware`.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.gateway.policies.block_index import BlockIndex, pack
from bough.gateway.policies.cache_aware import CacheAwarePolicy
from bough.gateway.policies.interface import RoutingRequest
from bough.gateway.policies.prompt_book import STEP, Known, PromptBook
from bough.memory.tree.events import KVEvent
from bough.memory.tree.node import TOKEN_BYTES


class KVEventsPolicy(CacheAwarePolicy):
    """Owns, for one model, the workers' block indexes and the book of prompts besides the tree of sent texts."""

    def __init__(
        self,
        cache_threshold: float = 0.1,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        max_load_factor: float | None = 1.5,
        eviction_interval_secs: float = 60.0,
        max_tree_size: int = 2**26,
        trust_sent_secs: float = 2.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            cache_threshold,
            balance_abs_threshold,
            balance_rel_threshold,
            max_load_factor,
            eviction_interval_secs,
            max_tree_size,
            seed,
        )
        self._trust_sent_s = trust_sent_secs
        self._indexes: dict[str, BlockIndex] = {}
        self._book = PromptBook()

    def cached(self, request: RoutingRequest) -> dict[str, float]:
        chars = max(1, len(request.text))
        by_text = self._sent.match(request.text)
        known = self._known(request)
        # What was sent is learned to within two steps (see `curious`); where it is not, learning lags or failed.
        if known is None or max(by_text.values(), default=0) > known.chars + 2 * STEP:
            return {worker: length / chars for worker, length in by_text.items()}
        recent = self._sent.match(request.text, since=self._now_s - self._trust_sent_s)
        shares = {worker: by_text[worker] / chars for worker in by_text if worker not in self._indexes}
        tokens = max(1, len(known.ids) // TOKEN_BYTES)
        for worker, index in self._indexes.items():
            exact = index.match(known.ids) / tokens * known.chars
            shares[worker] = max(exact, recent.get(worker, 0)) / chars
        return shares

    def _known(self, request: RoutingRequest) -> Known | None:
        if request.token_ids is not None:
            return Known(pack(request.token_ids), len(request.text))
        return self._book.find(request.text)

    # ---- events and prompts

    def observe(self, worker_id: str, event: KVEvent) -> None:
        """A worker has published an event."""
        self._indexes.setdefault(worker_id, BlockIndex()).apply(event)

    def restart(self, worker_id: str) -> None:
        """A worker's events begin anew (it restarted, or some were lost): what was known of its cache holds no more."""
        self._indexes[worker_id] = BlockIndex()

    def unobserved(self, worker_id: str) -> None:
        """A worker's events are not followed any more."""
        self._indexes.pop(worker_id, None)

    def curious(self, request: RoutingRequest) -> bool:
        """Whether the ids of this prompt would teach anything."""
        if request.token_ids is not None:
            return False
        known = self._book.find(request.text)
        return known is None or len(request.text) - known.chars > STEP

    def learn(self, text: str, token_ids: Sequence[int]) -> None:
        """The ids of a prompt that was sent."""
        self._book.learn(text, token_ids)

    def removed(self, worker_id: str) -> None:
        super().removed(worker_id)
        self.unobserved(worker_id)

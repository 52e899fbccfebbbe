"""Routes a request to the worker that holds most of its prompt, as the workers publish it.

Block indexes say exactly what each worker has cached, but need token ids: those of the request, or of an earlier prompt
that begins the same (`PromptBook`). What was sent in the last seconds counts as cached before its event arrives.
Without ids, and for workers that publish nothing, the tree of sent texts decides as in `cache_aware`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bough.gateway.policies import RoutingRequest
from bough.gateway.policies.block_index import BlockIndex, pack
from bough.gateway.policies.cache_aware import CacheAwarePolicy
from bough.memory.tree.events import KVEvent
from bough.memory.tree.node import TOKEN_BYTES

STEP = 256  # characters, some 64 tokens


@dataclass(frozen=True, slots=True)
class Known:
    """The longest beginning of a text whose ids are known."""

    ids: bytes  # packed, and cut to that beginning
    chars: int


@dataclass(slots=True, eq=False)
class _Prompt:
    """The packed ids of a whole prompt, kept while a page refers to them."""

    ids: bytes
    pages: int = 0


class PromptBook:
    """Token ids of earlier prompts, found by text; least recently used first out. Beginnings are hashed every `STEP`
    characters, and token positions are taken in proportion. Ids have a limit of their own: one page keeps all ids of
    its prompt."""

    def __init__(self, most: int = 200_000, most_bytes: int = 1 << 28) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0  # of the ids of all prompts that a page has
        self._pages: OrderedDict[int, tuple[_Prompt, int]] = OrderedDict()  # hash → a whole prompt, tokens of it

    def learn(self, text: str, token_ids: Sequence[int]) -> None:
        try:
            prompt = _Prompt(pack(token_ids))
        except OverflowError:  # no tokenizer gives such ids
            return
        self._bytes += len(prompt.ids)
        for page, chars in _beginnings(text):
            prompt.pages += 1
            if page in self._pages:
                self._release(self._pages.pop(page)[0])
            self._pages[page] = (prompt, len(token_ids) * chars // max(1, len(text)))
        while len(self._pages) > self._most or self._bytes > self._most_bytes:
            self._release(self._pages.popitem(last=False)[1][0])

    def _release(self, prompt: _Prompt) -> None:
        prompt.pages -= 1
        if not prompt.pages:
            self._bytes -= len(prompt.ids)

    def find(self, text: str) -> Known | None:
        found, reached = None, 0
        for page, chars in _beginnings(text):
            if page not in self._pages:
                break
            found, reached = self._pages[page], chars
            self._pages.move_to_end(page)
        return None if found is None else Known(found[0].ids[: found[1] * TOKEN_BYTES], reached)


def _beginnings(text: str) -> Iterator[tuple[int, int]]:
    """(hash, length) of every beginning of a text in steps of `STEP` characters, the whole last."""
    page = 0
    for start in range(0, max(1, len(text)), STEP):
        piece = text[start : start + STEP]
        page = hash((page, piece))
        yield page, start + len(piece)


# ---- the policy


@dataclass(eq=False)
class KVEventsPolicy(CacheAwarePolicy):
    cache_threshold: float = 0.1
    max_load_factor: float | None = 1.5
    trust_sent_secs: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._indexes: dict[str, BlockIndex] = {}
        self._book = PromptBook()

    def cached(self, request: RoutingRequest) -> dict[str, float]:
        chars = max(1, len(request.text))
        by_text = self._sent.match(request.text)
        known = self._known(request)
        # What was sent is learned to within two steps (see `curious`); where it is not, learning lags or failed.
        if known is None or max(by_text.values(), default=0) > known.chars + 2 * STEP:
            return {worker: length / chars for worker, length in by_text.items()}
        recent = self._sent.match(request.text, since=self._now_s - self.trust_sent_secs)
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
        self._indexes.setdefault(worker_id, BlockIndex()).apply(event)

    def restart(self, worker_id: str) -> None:
        """The worker restarted or events were lost: its cache is unknown."""
        self._indexes[worker_id] = BlockIndex()

    def unobserved(self, worker_id: str) -> None:
        self._indexes.pop(worker_id, None)

    def curious(self, request: RoutingRequest) -> bool:
        """Whether the ids of this prompt are unknown."""
        known = self._known(request)
        return known is None or len(request.text) - known.chars > STEP

    def learn(self, text: str, token_ids: Sequence[int]) -> None:
        self._book.learn(text, token_ids)

    def removed(self, worker_id: str) -> None:
        super().removed(worker_id)
        self.unobserved(worker_id)

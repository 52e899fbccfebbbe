"""A stand-in for an engine: what it would have cached, and how long its work would take, without doing any.

The cache is the engine's own (`RadixTree` over a `PagePool`, with its eviction and its events); time follows from a few
numbers: prefill per token that is not cached, decode per token, more of it the more answers are made at once. Prompts
are prefilled one after the other, as on one device; decodes run beside them. A token is four characters, so a prefix
in text is a prefix in tokens wherever texts are made of whole tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree import KVEvent, Node, PagePool, RadixTree

TOKEN_CHARS = 4
PAGE_TOKENS = 16


def tokenize(text: str) -> IntArray:
    """Token ids of a text: four characters each; the last is filled up."""
    raw = text.encode("latin-1", "replace")
    return np.frombuffer(raw + b" " * (-len(raw) % TOKEN_CHARS), dtype=np.int32) & 0x7FFFFFFF


def answer_text(request: int, tokens: int) -> str:
    """What a stand-in answers: `tokens` tokens that no other request is answered with."""
    return "".join(f"{(request * 7919 + token) % 9973:04d}" for token in range(tokens))


@dataclass(frozen=True, slots=True)
class Costs:
    """How fast an engine is, and how much it remembers."""

    prefill_us: float = 100.0  # per token that is not cached
    decode_ms: float = 10.0  # per token of an answer
    crowd_ms: float = 0.1  # added to that by each other answer that is made at the same time
    cache_tokens: int = 65_536


@dataclass(frozen=True, slots=True)
class Seat:
    """A request in progress: how much of its prompt was cached, and what of the cache it holds."""

    prompt_tokens: int
    cached_tokens: int
    node: Node


class EngineModel:
    """Owns the cache of one stand-in."""

    def __init__(self, costs: Costs, on_event: Callable[[KVEvent], None] | None = None) -> None:
        self._costs = costs
        self._running = 0
        self._pool = PagePool(max(1, costs.cache_tokens // PAGE_TOKENS))
        self._tree = RadixTree(PAGE_TOKENS, on_event=on_event)

    def begin(self, prompt: IntArray) -> Seat:
        """The prompt's prefill starts: its prefix is held, the rest enters the cache as far as there is room."""
        held = self._tree.match(prompt)
        self._tree.lock(held.node)
        node = self._remember(prompt, held.node)
        self._running += 1
        return Seat(len(prompt), held.length, node)

    def _remember(self, tokens: IntArray, locked: Node) -> Node:
        """Caches the whole pages of `tokens`, and moves the lock there; without room all stays as it is."""
        whole = tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS]
        missing = (len(whole) - self._tree.match_length(whole)) // PAGE_TOKENS
        if missing > self._pool.free:
            self._pool.give(self._tree.evict(missing - self._pool.free))
        if missing > self._pool.free or len(whole) == 0:
            return locked
        known = self._tree.match(whole)
        pages = np.concatenate([known.pages, self._pool.take(missing)])
        node = self._tree.insert(whole, pages).node
        self._tree.lock(node)
        self._tree.unlock(locked)
        return node

    def prefill_s(self, seat: Seat) -> float:
        return (seat.prompt_tokens - seat.cached_tokens) * self._costs.prefill_us * 1e-6

    def decode_s(self, tokens: int) -> float:
        """How long an answer takes, with as many others beside it as there are at its start."""
        return tokens * (self._costs.decode_ms + self._costs.crowd_ms * (self._running - 1)) * 1e-3

    def finish(self, seat: Seat, prompt_and_answer: IntArray) -> None:
        """The answer is complete: it stays cached behind its prompt, and nothing is held any more."""
        self._running -= 1
        self._tree.unlock(self._remember(prompt_and_answer, seat.node))

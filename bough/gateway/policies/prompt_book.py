"""The token ids of prompts seen before, found again by text: how a gateway without a tokenizer looks into token caches.

Whatever a worker has cached of a prompt came in an earlier prompt that begins the same. So it is enough to know the ids
of earlier prompts: they are asked from a worker behind the request's back (`bough.gateway.prompt_learner`), and a later
prompt uses the ids of the text that it shares with them. Texts are remembered by the hashes of their beginnings at
every `STEP` characters; where tokens end within a text is taken in proportion, which is off by a few tokens at most
and the same for all workers that are compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bough.gateway.policies.block_index import pack
from bough.memory.tree.node import TOKEN_BYTES

STEP = 256  # characters, some 64 tokens


@dataclass(frozen=True, slots=True)
class Known:
    """The longest beginning of a text whose ids are known."""

    ids: bytes  # packed, and cut to that beginning
    chars: int


@dataclass(slots=True, eq=False)
class _Prompt:
    """The packed ids of a whole prompt, kept as long as a page has them."""

    ids: bytes
    pages: int = 0


class PromptBook:
    """Owns the remembered beginnings; the ones unused for longest go first. Ids are bounded by themselves: one page of
    its own is enough to keep all ids of a long prompt whose other pages are another one's by now."""

    def __init__(self, most: int = 200_000, most_bytes: int = 1 << 28) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0  # of the ids of all prompts that a page has
        self._pages: OrderedDict[int, tuple[_Prompt, int]] = OrderedDict()  # hash → a whole prompt, tokens of it

    def learn(self, text: str, token_ids: Sequence[int]) -> None:
        """Remembers the ids of a text."""
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
        """A page of the prompt is gone."""
        prompt.pages -= 1
        if not prompt.pages:
            self._bytes -= len(prompt.ids)

    def find(self, text: str) -> Known | None:
        """The longest beginning of a text that is known."""
        found, reached = None, 0
        for page, chars in _beginnings(text):
            if page not in self._pages:
                break
            found, reached = self._pages[page], chars
            self._pages.move_to_end(page)
        return None if found is None else Known(found[0].ids[: found[1] * TOKEN_BYTES], reached)


def _beginnings(text: str) -> Iterator[tuple[int, int]]:
    """A hash of every beginning of a text, `STEP` characters longer each time, with its length; the whole comes last.
    Each is made from the one before, so that a long text is gone through once."""
    page = 0
    for start in range(0, max(1, len(text)), STEP):
        piece = text[start : start + STEP]
        page = hash((page, piece))
        yield page, start + len(piece)

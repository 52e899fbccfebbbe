"""The token ids of prompts seen before, found again by text: how a gateway without a tokenizer looks into token caches.

Whatever a worker has cached of a prompt came in an earlier prompt that begins the same. So it is enough to know the ids
of earlier prompts: they are asked from a worker behind the request's back (`bough.gateway.prompt_learner`), and a later
prompt uses the ids of the text that it shares with them. Texts are remembered by the hashes of their beginnings at
every `STEP` characters; where tokens end within a text is taken in proportion, which is off by a few tokens at most
and the same for all workers that are compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from bough.gateway.policies.block_index import pack
from bough.memory.tree.node import TOKEN_BYTES

STEP = 256  # characters, some 64 tokens


@dataclass(frozen=True, slots=True)
class Known:
    """The longest beginning of a text whose ids are known."""

    ids: bytes  # packed, and cut to that beginning
    chars: int


class PromptBook:
    """Owns the remembered beginnings; the ones unused for longest go first."""

    def __init__(self, most: int = 200_000) -> None:
        self._most = most
        self._pages: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # hash → ids of a whole prompt, tokens of it

    def learn(self, text: str, token_ids: Sequence[int]) -> None:
        """Remembers the ids of a text."""
        ids = pack(token_ids)
        for chars in (*range(STEP, len(text), STEP), len(text)):
            page = hash(text[:chars])
            self._pages[page] = (ids, len(token_ids) * chars // max(1, len(text)))
            self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def find(self, text: str) -> Known | None:
        """What is known of a text. Shorter beginnings are known wherever longer ones are, so halving finds the end."""
        if (whole := self._read(text, len(text))) is not None:
            return whole
        low, high = 0, len(text) // STEP + 1
        found: Known | None = None
        while high - low > 1:
            middle = (low + high) // 2
            known = self._read(text, middle * STEP)
            if known is None:
                high = middle
            else:
                low, found = middle, known
        return found

    def _read(self, text: str, chars: int) -> Known | None:
        page = hash(text[:chars])
        if page not in self._pages:
            return None
        self._pages.move_to_end(page)
        ids, tokens = self._pages[page]
        return Known(ids[: tokens * TOKEN_BYTES], chars)

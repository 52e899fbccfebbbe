"""How much of a text is worth tokenising: strangers send texts that are far longer than any prompt can be.

A token costs some hundred bytes and microseconds while a text is encoded, so a text of the size of a request's body
would take minutes and gigabytes, only to be refused for its length. With a bound, its tokens are counted piece by
piece, and the counting ends where the answer is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bough.core.errors import RequestError

PIECE = 1 << 16  # characters that are counted at once
LEAST_BOUND = 1 << 18  # tokens: counting as many takes about a second, and some want to know how long a document is
BYTES_PER_TOKEN = 4  # of ordinary prompts; those that fit into the context are not looked at twice


@dataclass(frozen=True, slots=True)
class TextBound:
    """For a model that reads `context` tokens. A text with more than `tokens` tokens is refused or, with `cut`, read
    only so far that the engine, which cuts it to the token, still finds more than it can use."""

    context: int
    cut: bool = False
    least: int = LEAST_BOUND

    @property
    def tokens(self) -> int:
        """At least twice the context: pieces are counted by themselves, so a count may be somewhat too high."""
        return max(2 * self.context, self.least)

    def apply(self, text: str, count: Callable[[str], int], *, whole: bool = False) -> str:
        """What is to be encoded of the text: all of it, or its beginning where it may be cut (`whole`: it may not)."""
        if self._surely_fits(text):
            return text
        counted = 0
        for end in range(PIECE, len(text) + PIECE, PIECE):
            counted += count(text[end - PIECE : end])
            if counted > self.tokens:
                if self.cut and not whole:
                    return text[:end]
                raise RequestError(
                    f"The prompt has more than {self.tokens} tokens, the context is {self.context} tokens. "
                    "Shorten the prompt.",
                    field="input_ids",
                )
        return text

    def _surely_fits(self, text: str) -> bool:
        """No token has less than a byte."""
        most = BYTES_PER_TOKEN * self.tokens
        return len(text) <= most and (text.isascii() or len(text.encode(errors="replace")) <= most)

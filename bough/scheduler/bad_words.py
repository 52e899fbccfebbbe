"""Words of several tokens that an answer must not say: where all but the last of one were just said, the last is
forbidden.

Words of one token are a logit bias and never come here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BadWords:
    """Owns the last tokens that its request has said: `say` each of them. A request without such words has one too."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}  # by the tokens before
        for *head, last in words:
            self._ends.setdefault(tuple(head), []).append(last)
        self._lengths = {len(head) for head in self._ends}
        self._said = deque[int](maxlen=max(self._lengths, default=0))

    def __bool__(self) -> bool:
        return bool(self._ends)

    def say(self, token: int) -> None:
        self._said.append(token)

    def forbidden(self) -> list[int]:
        """The tokens that would complete a word."""
        said = tuple(self._said)
        return [token for length in self._lengths for token in self._ends.get(said[-length:], ())]

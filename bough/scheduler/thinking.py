"""Where a request stands in its model's thinking: a grammar holds only for what comes after it, a budget ends it.

The thinking is marked by tokens. It has begun when the prompt opened it; else the model may open it as the first thing
it says, and an answer that begins otherwise has none. Owns the count of its tokens and what of a marker was said.
"""

from __future__ import annotations

from bough.messages.requests import Thinking


class ThinkingTrack:
    """Follows one request's tokens until its thinking is over."""

    def __init__(self, marks: Thinking) -> None:
        self._marks = marks
        self._inside = marks.begun
        self._opening: tuple[int, ...] = ()  # of a marker that the answer has begun with
        self._tail: tuple[int, ...] = ()  # the last tokens inside, as many as the end marker has
        self._spent = 0
        self._cut = 0  # tokens of the ending that the budget enforces, said so far
        self.over = False

    @property
    def openings(self) -> tuple[int, ...]:
        """Before the thinking: the tokens that may come because they begin it, or end it unopened."""
        if self.over or self._inside:
            return ()
        said = len(self._opening)
        markers = (self._marks.start, self._marks.end)
        return tuple({m[said] for m in markers if len(m) > said and m[:said] == self._opening})

    @property
    def undecided(self) -> bool:
        """Nothing has been said that tells whether the model thinks: its answer may begin as well."""
        return not self.over and not self._inside and not self._opening

    @property
    def forced(self) -> int | None:
        """The one token that may come when the budget is used up."""
        if not self._inside or self._marks.budget is None or self._spent < self._marks.budget:
            return None
        return self._marks.cut[self._cut]

    def take(self, token: int) -> bool:
        """Follows a sampled token; False when it is the first of the answer, and no part of the thinking."""
        if not self._inside:
            return self._open(token)
        self._cut += self.forced is not None
        self._spent += 1
        self._tail = (*self._tail, token)[-len(self._marks.end) :]
        self.over = self._tail == self._marks.end or self._cut == len(self._marks.cut)
        return True

    def _open(self, token: int) -> bool:
        if token not in self.openings:
            self.over = True
            return False
        self._opening = (*self._opening, token)
        self._inside = self._opening == self._marks.start
        self.over = self._opening == self._marks.end
        return True

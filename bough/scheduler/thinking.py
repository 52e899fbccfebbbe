"""Where a request stands in its model's thinking: a grammar holds only for what comes after it, a budget ends it.

Markers open and close it. It has begun when the prompt opened it; else the model may open it as the first thing it
says. An answer may begin with the first tokens of a marker too: until they differ, both are possible.
"""

from bough.messages.requests import Thinking


class ThinkingTrack:
    def __init__(self, marks: Thinking) -> None:
        self._marks = marks
        self._opening: tuple[int, ...] = ()  # of a marker that the answer has begun with
        self._tail: tuple[int, ...] = ()  # the last tokens inside, as many as the end marker has
        self._spent = 0
        self._cut = 0  # tokens of the ending that the budget enforces, said so far
        self.inside = marks.begun
        self.over = False

    @property
    def undecided(self) -> bool:
        """What was said so far does not tell whether the model thinks."""
        return not self.over and not self.inside

    @property
    def openings(self) -> tuple[int, ...]:
        """While it is undecided: the tokens that go on with a marker, which begins the thinking or ends it unopened."""
        if not self.undecided:
            return ()
        said = len(self._opening)
        markers = (self._marks.start, self._marks.end)
        return tuple({m[said] for m in markers if len(m) > said and m[:said] == self._opening})

    @property
    def forced(self) -> int | None:
        """The one token that may come when the budget is used up."""
        if not self.inside or self._marks.budget is None or self._spent < self._marks.budget:
            return None
        return self._marks.cut[self._cut]

    def open(self, token: int) -> None:
        self._opening = (*self._opening, token)
        self.inside = self._opening == self._marks.start
        self.over = self._opening == self._marks.end

    def think(self, token: int) -> None:
        self._cut += self.forced is not None
        self._spent += 1
        self._tail = (*self._tail, token)[-len(self._marks.end) :]
        self.over = self._tail == self._marks.end or self._cut == len(self._marks.cut)
        self.inside = not self.over

"""The text of a stream as a grammar reads it: it may wait for more in the middle of a word.

A grammar is a generator. It yields events, and `None` when it needs more text; so any chunking gives the same events. A
source owns the unused text and, behind a mark, what was used, in case that a call turns out to be none.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from bough.parsers.events import Event

T = TypeVar("T")
Steps = Generator[Event | None, None, T]
Show = Callable[[str], Event]

SPACE = " \t\r\n"
BLANKS = re.compile(rf"[{SPACE}]*")
MOST_SPACE = 256  # that goes with a marker
MOST_NAME = 300  # characters of a name, or of an id that has one in it


class MalformedError(Exception):
    """What is being read is not what it began as. Never leaves this room: it becomes text."""


class Markers:
    """Texts of which the first to come ends a passage. None may be part of another. Up to `most` characters of `before`
    belong to a marker behind them; without a bound, an answer of such characters would be held back as a whole."""

    def __init__(self, *texts: str, before: str = "", most: int = MOST_SPACE) -> None:
        for text in texts:
            assert text, "an empty marker"
            assert not any(text in other for other in texts if other is not text), f"{text!r} is part of another marker"
        self._texts = texts
        self._before = before
        self._most = most
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._firsts = "".join({text[0] for text in texts})
        self._longest = max(map(len, texts))

    def find(self, text: str, start: int) -> tuple[int, int, str] | None:
        """Where the passage that begins at `start` ends, where the marker ends, and which one it is."""
        found = self._pattern.search(text, start)
        if found is None:
            return None
        return self._end_of_passage(text, start, found.start()), found.end(), found[0]

    def certain(self, text: str, start: int) -> int:
        """Up to where a text without a marker belongs to the passage, whatever follows."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(each.startswith(text[at:]) for each in self._texts):
                return self._end_of_passage(text, start, at)
        return self._end_of_passage(text, start, len(text))

    def _end_of_passage(self, text: str, start: int, at: int) -> int:
        earliest = max(start, at - self._most)
        while at > earliest and text[at - 1] in self._before:
            at -= 1
        return at


class Source:
    def __init__(self) -> None:
        self.closed = False
        self.text = ""  # what has come; before `at` it has been used
        self.at = 0
        self._used: list[str] | None = None  # since the mark

    def append(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def empty(self) -> bool:
        return self.at == len(self.text)

    # ---- the mark

    def mark(self) -> None:
        """What is used from here on is remembered."""
        self._used = []

    def since_mark(self) -> str:
        """What was used since the mark, which is gone with that."""
        used, self._used = "".join(self._used or ()), None
        return used

    # ---- reading

    def take(self, end: int) -> str:
        taken, self.at = self.text[self.at : end], end
        if self._used is not None:
            self._used.append(taken)
        return taken

    def more(self) -> Steps[None]:
        """Waits until there is more text than now; a stream that has ended is malformed where it is asked for more."""
        if self.closed:
            raise MalformedError("the stream has ended")
        yield None

    def peek(self) -> Steps[str]:
        while self.empty and not self.closed:
            yield None
        return self.text[self.at : self.at + 1]

    def starts(self, text: str) -> Steps[bool]:
        while self._may_become(text, self.at):
            yield None
        return self.text.startswith(text, self.at)

    def starts_after_space(self, text: str) -> Steps[bool]:
        """Whether this comes next, but for a little white space; neither is used."""
        while True:
            first = self.at
            while first < len(self.text) and first - self.at < MOST_SPACE and self.text[first] in SPACE:
                first += 1
            if not self._may_become(text, first):
                return self.text.startswith(text, first)
            yield None

    def _may_become(self, text: str, at: int) -> bool:
        """Whether it takes more of the stream to know if it goes on with a text."""
        length = len(self.text) - at
        return not self.closed and length < len(text) and self.text.startswith(text[:length], at)

    def skip(self, text: str) -> Steps[bool]:
        if not (yield from self.starts(text)):
            return False
        self.take(self.at + len(text))
        return True

    def skip_after_space(self, text: str) -> Steps[bool]:
        """The same with a little white space before it."""
        if not (yield from self.starts_after_space(text)):
            return False
        yield from self.expect_after_space(text)
        return True

    def skip_end(self, text: str) -> Steps[bool]:
        """Skips what closes something that is complete already: at the end of a stream part of it will do."""
        if (yield from self.skip(text)):
            return True
        left = len(self.text) - self.at
        if self.closed and left < len(text) and self.text.startswith(text[:left], self.at):
            self.take(len(self.text))
            return True
        return False

    def close(self, text: str) -> Steps[bool]:
        """Skips what closes a block that is complete, and space before it. A failure behind it takes nothing back."""
        self.mark()
        yield from self.skip_space()
        return (yield from self.skip_end(text))

    def expect(self, text: str) -> Steps[None]:
        if not (yield from self.skip(text)):
            raise MalformedError(f"no {text!r}")

    def expect_after_space(self, text: str) -> Steps[None]:
        yield from self.skip_space()
        yield from self.expect(text)

    def skip_space(self) -> Steps[None]:
        yield from self.word(BLANKS)

    def word(self, characters: re.Pattern[str]) -> Steps[str]:
        """The longest run that a pattern of characters matches; be it none."""
        taken: list[str] = []
        while True:
            found = characters.match(self.text, self.at)
            assert found is not None, "a pattern that matches nothing"
            taken.append(self.take(found.end()))
            if not self.empty or self.closed:
                return "".join(taken)
            yield None

    def passage(self, markers: Markers, show: Show, *, mark: bool = False) -> Steps[str | None]:
        """Shows the text up to a marker, as it comes, and uses both; the marker, or None at the end of the stream. With
        `mark` the marker, and what belongs to it, is marked."""
        while True:
            found = markers.find(self.text, self.at)
            if found is not None:
                end = found[0]
            else:
                end = len(self.text) if self.closed else markers.certain(self.text, self.at)
            if end > self.at:
                yield show(self.take(end))
            if found is not None:
                if mark:
                    self.mark()
                self.take(found[1])
                return found[2]
            if self.closed:
                return None
            yield None

    def rest(self, show: Show) -> Steps[None]:
        while True:
            if not self.empty:
                yield show(self.take(len(self.text)))
            if self.closed:
                return
            yield None

    def until(self, markers: Markers, most: int | None = None) -> Steps[tuple[str, str]]:
        """The text before a marker, and the marker; both are used. Malformed without one, and behind `most`
        characters."""
        pieces: list[str] = []
        left = most
        while True:
            found = markers.find(self.text, self.at)
            end = markers.certain(self.text, self.at) if found is None else found[0]
            if left is not None and end - self.at > left:
                self.take(self.at + left)
                raise MalformedError("too long")
            left = None if left is None else left - (end - self.at)
            pieces.append(self.take(end))
            if found is not None:
                self.take(found[1])
                return "".join(pieces), found[2]
            yield from self.more()


class StreamParser:
    def __init__(self, grammar: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = grammar(self._source)

    def feed(self, text: str) -> list[Event]:
        self._source.append(text)
        return self._run()

    def finish(self) -> list[Event]:
        self._source.closed = True
        return self._run()

    def _run(self) -> list[Event]:
        events: list[Event] = []
        for step in self._steps:
            if step is None:
                break
            events.append(step)
        return events

"""The text of a stream as a grammar reads it: it may wait for more in the middle of a word.

A grammar is a generator. It yields events, and `None` when it cannot go on without more text; `StreamParser` resumes it
when there is some. Whatever a grammar asks of a `Source` is answered by the text alone and never by how it was cut: a
question whose answer depends on what has not come yet waits for it. That is why any chunking gives the same events.

A source owns what has come and is not used yet, and, behind a mark, what was used: should a call turn out to be none,
its text is still there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from bough.parsers.events import Event

T = TypeVar("T")
Steps = Generator[Event | None, None, T]
Show = Callable[[str], Event]

SPACE = " \t\r\n"


class MalformedError(Exception):
    """What is being read is not what it began as. Never leaves this room: it becomes text."""


class Markers:
    """Texts of which the first to come ends a passage. None may be part of another.

    `before` are characters that belong to a marker where they stand directly before it; `most` is how many.
    """

    def __init__(self, *texts: str, before: str = "", most: int | None = None) -> None:
        for text in texts:
            assert text, "an empty marker"
            assert not any(text in other for other in texts if other is not text), f"{text!r} is part of another marker"
        self._texts = texts
        self._before = before
        self._most = most
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._firsts = "".join({text[0] for text in texts})
        self._longest = max(map(len, texts))

    def find(self, text: str) -> tuple[int, int, str] | None:
        """Where the passage ends, where the marker ends, and which one it is."""
        found = self._pattern.search(text)
        if found is None:
            return None
        return self._end_of_passage(text, found.start()), found.end(), found[0]

    def certain(self, text: str) -> int:
        """How much of a text without a marker belongs to the passage, whatever follows."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(each.startswith(text[at:]) for each in self._texts):
                return self._end_of_passage(text, at)
        return self._end_of_passage(text, len(text))

    def _end_of_passage(self, text: str, at: int) -> int:
        end = at
        while end and text[end - 1] in self._before and (self._most is None or at - end < self._most):
            end -= 1
        return end


class Source:
    """What has come of a stream and is not used yet."""

    def __init__(self) -> None:
        self.closed = False
        self._text = ""
        self._used: list[str] | None = None  # since the mark

    def append(self, text: str) -> None:
        self._text += text

    # ---- the mark

    def mark(self) -> None:
        """What is used from here on is remembered."""
        self._used = []

    def since_mark(self) -> str:
        """What was used since the mark, which is gone with that."""
        used, self._used = "".join(self._used or ()), None
        return used

    # ---- reading

    def take(self, count: int) -> str:
        """The next characters, which are known to be there."""
        taken, self._text = self._text[:count], self._text[count:]
        if self._used is not None:
            self._used.append(taken)
        return taken

    @property
    def here(self) -> str:
        """What is there; looking at it is no use of it, and its end says nothing."""
        return self._text

    def more(self) -> Steps[None]:
        """Waits until there is more text than now; a stream that has ended is malformed where it is asked for more."""
        if self.closed:
            raise MalformedError("the stream has ended")
        yield None

    def peek(self) -> Steps[str]:
        """The next character, or nothing at the end of the stream."""
        while not self._text and not self.closed:
            yield None
        return self._text[:1]

    def starts(self, text: str) -> Steps[bool]:
        """Whether this comes next."""
        while len(self._text) < len(text) and not self.closed and text.startswith(self._text):
            yield None
        return self._text.startswith(text)

    def skip(self, text: str) -> Steps[bool]:
        """Uses this text if it comes next."""
        if not (yield from self.starts(text)):
            return False
        self.take(len(text))
        return True

    def skip_end(self, text: str) -> Steps[bool]:
        """The same for what closes something that is complete already: at the end of a stream part of it will do."""
        if (yield from self.skip(text)):
            return True
        if self.closed and text.startswith(self._text):
            self.take(len(self._text))
            return True
        return False

    def starts_after_space(self, text: str) -> Steps[bool]:
        """Whether this comes next, but for white space; neither is used."""
        while not self.closed and text.startswith(self._text.lstrip(SPACE)) and self._text.lstrip(SPACE) != text:
            yield None
        return self._text.lstrip(SPACE).startswith(text)

    def expect(self, text: str) -> Steps[None]:
        if not (yield from self.skip(text)):
            raise MalformedError(f"no {text!r}")

    def skip_space(self) -> Steps[None]:
        """Uses all white space that comes next."""
        while True:
            self.take(len(self._text) - len(self._text.lstrip(SPACE)))
            if self._text or self.closed:
                return
            yield None

    def word(self, characters: re.Pattern[str]) -> Steps[str]:
        """The longest run of characters that each match; be it none."""
        taken: list[str] = []
        while True:
            run = 0
            while run < len(self._text) and characters.match(self._text[run]):
                run += 1
            taken.append(self.take(run))
            if self._text or self.closed:
                return "".join(taken)
            yield None

    def passage(self, markers: Markers, show: Show, *, mark: bool = False) -> Steps[str | None]:
        """Shows the text up to a marker, as it comes, and uses both; the marker, or None at the end of the stream. With
        `mark` the marker, and what belongs to it, is marked."""
        while True:
            found = markers.find(self._text)
            end = found[0] if found else len(self._text) if self.closed else markers.certain(self._text)
            if end:
                yield show(self.take(end))
            if found:
                if mark:
                    self.mark()
                self.take(found[1] - end)
                return found[2]
            if self.closed:
                return None
            yield None

    def rest(self, show: Show) -> Steps[None]:
        """Shows everything that comes."""
        while True:
            if self._text:
                yield show(self.take(len(self._text)))
            if self.closed:
                return
            yield None

    def until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """The text before a marker, and the marker; both are used. Malformed without one."""
        pieces: list[str] = []
        while True:
            found = markers.find(self._text)
            end = found[0] if found else markers.certain(self._text)
            pieces.append(self.take(end))
            if found:
                self.take(found[1] - end)
                return "".join(pieces), found[2]
            yield from self.more()


class StreamParser:
    """Runs one grammar over one stream."""

    def __init__(self, grammar: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = grammar(self._source)

    def feed(self, text: str) -> list[Event]:
        """The events that more text brings."""
        self._source.append(text)
        return self._run()

    def finish(self) -> list[Event]:
        """The events that the end of the stream brings."""
        self._source.closed = True
        return self._run()

    def _run(self) -> list[Event]:
        events: list[Event] = []
        for step in self._steps:
            if step is None:
                break
            events.append(step)
        return events

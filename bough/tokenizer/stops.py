"""Stop strings and stop regexes over a stream of text.

Only what may still become a stop is held back, so the outcome does not depend on how the text was cut. The match that
is complete first counts; of those that end together, the longest. A regex stops at its earliest match that is not
empty, and holds back at most `MAX_HELD` characters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bough.core.errors import RequestError
from bough.core.stop_patterns import compile_pattern

if TYPE_CHECKING:
    import regex

MAX_HELD = 4096  # characters that regexes may hold back
REGEX_CONTEXT = 256  # characters of emitted text that a regex still sees: for \b, ^ and look-behind
REGEX_TIMEOUT_S = 0.1  # a search takes microseconds; one this long backtracks, and every other stream waits for it
REGEX_BUDGET_S = 1.0  # CPU time for all searches of one request; a sane pattern needs a hundredth over a whole answer


class StopOutcome(NamedTuple):
    """Text to pass on, and what stopped it, if anything did."""

    emit: str
    matched: str | None  # the stop string, or the pattern
    matched_text: str | None = None  # what the pattern has matched


class _Match(NamedTuple):
    """Where in the text a stop was found; the smallest is the one that counts."""

    end: int
    start: int
    stop: str
    text: str | None = None  # of a pattern


class StopMatcher:
    """Looks for the first stop in a text that comes in parts. After a match, everything further is dropped."""

    __slots__ = (
        *("_begun", "_emitted", "_first_chars", "_keep_match"),
        *("_patterns", "_spent_s", "_stopped", "_strings", "_text"),
    )

    def __init__(self, strings: Sequence[str], regexes: Sequence[str], keep_match: bool) -> None:
        self._strings = tuple(strings)
        self._begun = [0] * len(strings)  # by string: how many of its characters end the text so far
        self._first_chars = frozenset(string[0] for string in strings)
        self._patterns = tuple(regexes)  # compiled when text comes: an error then is that of `push`
        self._keep_match = keep_match
        self._text = ""  # some emitted text (for regexes only), then the held text
        self._emitted = 0  # where in it the held text begins
        self._stopped = False
        self._spent_s = 0.0

    def push(self, text: str) -> StopOutcome:
        """More text in; out comes what no stop can claim any more."""
        if self._stopped:
            return StopOutcome("", None)
        if not self._text and not self._patterns and self._first_chars.isdisjoint(text):
            return StopOutcome(text, None)  # nothing is held and nothing begins here: nearly every token
        offset = len(self._text)
        self._text += text
        found = []
        for i, string in enumerate(self._strings):
            first = offset - self._begun[i]
            if (start := self._text.find(string, first)) >= 0:
                found.append(_Match(start + len(string), start, string))
            self._begun[i] = _end_that_begins(string, self._text, first)
        held = max(self._begun, default=0)
        for pattern in map(compile_pattern, self._patterns):
            match, may_match = self._search(pattern)
            held = max(held, may_match)
            if match is not None:
                found.append(match)
        if found:
            return self._stop(min(found))
        return StopOutcome(self._emit_up_to(len(self._text) - held), None)

    def flush(self) -> str:
        return self._emit_up_to(len(self._text))

    def _stop(self, match: _Match) -> StopOutcome:
        emit = self._text[self._emitted : match.end if self._keep_match else match.start]
        self._stopped, self._text, self._emitted = True, "", 0
        return StopOutcome(emit, match.stop, match.text)

    def _search(self, pattern: regex.Pattern[str]) -> tuple[_Match | None, int]:
        """The pattern's match in the held text; else how many characters at the end may still become one."""
        began_s = time.thread_time()
        try:
            if self._spent_s > REGEX_BUDGET_S:
                raise TimeoutError
            match = pattern.search(self._text, self._emitted, partial=True, timeout=REGEX_TIMEOUT_S)
            if match is None:
                return None, 0
            if match.partial:
                return None, min(len(self._text) - match.start(), MAX_HELD)
            if match.end() == match.start():  # a pattern that can be empty matches so everywhere: look for more
                matches = pattern.finditer(self._text, self._emitted, timeout=REGEX_TIMEOUT_S)
                match = next((other for other in matches if other.end() > other.start()), None)
        except TimeoutError:
            raise RequestError(
                f"stop_regex {pattern.pattern!r} takes too long to search; write it without nested repetition.",
                field="stop_regex",
            ) from None
        finally:
            self._spent_s += time.thread_time() - began_s
        if match is None:
            return None, 0
        return _Match(match.end(), match.start(), pattern.pattern, match.group()), 0

    def _emit_up_to(self, end: int) -> str:
        emit = self._text[self._emitted : end]
        first_kept = max(0, end - REGEX_CONTEXT) if self._patterns else end
        self._text = self._text[first_kept:]
        self._emitted = end - first_kept
        return emit


def _end_that_begins(string: str, text: str, first: int) -> int:
    """How many of the last characters of a text, from `first` on, begin a string without completing it."""
    most = min(len(string) - 1, len(text) - first)
    return next((count for count in range(most, 0, -1) if text.endswith(string[:count])), 0)

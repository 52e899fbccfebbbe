"""Regular expressions, read once and written in the one form that all back ends understand alike.

Python's own parser reads a pattern; every class becomes explicit ranges, and what no automaton can do (look-around,
back references) is refused. Classes are ASCII, as in ECMAScript. A `regex` matches the whole text, a schema's `pattern`
any part of it unless it is anchored.
"""

import re
import warnings
from collections.abc import Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from bough.constrained import charsets
from bough.constrained.charsets import Ranges
from bough.constrained.pattern_tree import ANYTHING, EMPTY, Chars, Node, Row, choice, repeat
from bough.core.errors import RequestError

REFUSED = {
    sre.ASSERT: "look-around",
    sre.ASSERT_NOT: "look-around",
    sre.GROUPREF: "a back reference",
    sre.GROUPREF_EXISTS: "a conditional group",
    sre.ATOMIC_GROUP: "an atomic group",
    sre.POSSESSIVE_REPEAT: "a possessive quantifier",
}
CATEGORIES = {
    sre.CATEGORY_DIGIT: charsets.DIGIT,
    sre.CATEGORY_NOT_DIGIT: charsets.complement(charsets.DIGIT),
    sre.CATEGORY_SPACE: charsets.SPACE,
    sre.CATEGORY_NOT_SPACE: charsets.complement(charsets.SPACE),
    sre.CATEGORY_WORD: charsets.WORD,
    sre.CATEGORY_NOT_WORD: charsets.complement(charsets.WORD),
}
STARTS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
ENDS = (sre.AT_END, sre.AT_END_STRING)
MAX_NESTING = 100


class PatternError(RequestError):
    """A pattern that cannot be used, and why, without the field and the pattern."""

    def __init__(self, message: str, field: str, reason: str) -> None:
        super().__init__(message, field=field)
        self.reason = reason


def parse_regex(pattern: str, *, search: bool = False, field: str = "regex") -> Node:
    """The tree of a pattern that the whole text must match, or, with `search`, some part of it."""
    reader = _Reader(pattern, field)
    options = []
    for row in reader.alternatives():
        starts, inner, ends = _strip_anchors(row)
        node = reader.row(inner)
        parts: list[Node] = [] if starts or not search else [ANYTHING]
        parts.append(node)
        parts += [] if ends or not search else [ANYTHING]
        options.append(Row(tuple(parts)) if len(parts) > 1 else node)
    return choice(options)


def _strip_anchors(row: list[Any]) -> tuple[bool, list[Any], bool]:
    starts = ends = False
    while row and row[0][0] is sre.AT and row[0][1] in STARTS:
        starts, row = True, row[1:]
    while row and row[-1][0] is sre.AT and row[-1][1] in ENDS:
        ends, row = True, row[:-1]
    return starts, row, ends


class _Reader:
    def __init__(self, pattern: str, field: str) -> None:
        self._pattern = pattern
        self._field = field
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of sets that a later Python may read differently
                self._parsed = sre_parser.parse(re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise self._error(f"it is not valid ({error})") from None
        if self._parsed.state.flags & re.MULTILINE:
            raise self._error("the flag (?m) cannot be enforced")

    def alternatives(self) -> list[list[Any]]:
        """The rows of the outermost `|`, each with whatever the parser has moved in front of them all."""
        items = list(self._parsed)
        if items and items[-1][0] is sre.BRANCH and all(item[0] is sre.AT for item in items[:-1]):
            return [[*items[:-1], *option] for option in items[-1][1][1]]
        return [items]

    def row(self, items: Sequence[Any], flags: int | None = None, depth: int = 0) -> Node:
        if depth > MAX_NESTING:
            raise self._error(f"it is nested deeper than {MAX_NESTING} levels")
        state = self._parsed.state.flags if flags is None else flags
        parts = [part for item in items if (part := self._node(item, state, depth)) != EMPTY]
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _node(self, item: Any, flags: int, depth: int) -> Node:
        kind, value = item
        if kind is sre.BRANCH:
            return choice([self.row(option, flags, depth + 1) for option in value[1]])
        if kind is sre.SUBPATTERN:
            _, added, removed, inner = value
            return self.row(inner, (flags | added) & ~removed, depth + 1)
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = value
            return repeat(self.row(inner, flags, depth + 1), least, None if most is sre.MAXREPEAT else int(most))
        if kind is sre.AT:
            if value in (*STARTS, *ENDS):
                raise self._error("an anchor (^, $) can be enforced only at the pattern's ends, outside of groups")
            raise self._error("a word boundary (\\b, \\B) cannot be enforced")
        if kind in REFUSED:
            raise self._error(f"{REFUSED[kind]} cannot be enforced")
        found = self._ranges(kind, value, flags)
        if not found:
            raise self._error("a character class in it is empty")
        return Chars(found)

    def _ranges(self, kind: Any, value: Any, flags: int) -> Ranges:
        fold = charsets.both_cases if flags & re.IGNORECASE else lambda found: found
        if kind is sre.ANY:
            return charsets.ALL if flags & re.DOTALL else charsets.complement(charsets.NEWLINE)
        if kind is sre.LITERAL:
            return fold(charsets.ranges([(value, value)]))
        if kind is sre.NOT_LITERAL:
            return charsets.complement(fold(charsets.ranges([(value, value)])))
        if kind is sre.IN:
            members = [member for member in value if member[0] is not sre.NEGATE]
            joined = fold(charsets.ranges(pair for member in members for pair in self._member(*member)))
            return charsets.complement(joined) if len(members) < len(value) else joined
        raise self._error(f"{str(kind).lower()} cannot be enforced")

    def _member(self, kind: Any, value: Any) -> Ranges:
        if kind is sre.LITERAL:
            return charsets.ranges([(value, value)])
        if kind is sre.RANGE:
            return charsets.ranges([value])
        return CATEGORIES[value]

    def _error(self, reason: str) -> PatternError:
        shown = self._pattern if len(self._pattern) <= 80 else self._pattern[:77] + "…"
        return PatternError(
            f"{self._field}: the regular expression {shown!r} cannot be used: {reason}.", self._field, reason
        )

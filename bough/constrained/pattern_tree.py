"""A regular expression or a rule as a tree of a few kinds of node, and what is made of it: text, a size, its JSON
form.

Built by `regexes`, by `ebnf`, and by whoever needs a pattern of its own. Text is written so that every back end reads
it alike: explicit classes, plain groups, counted repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bough.constrained import charsets
from bough.constrained.charsets import Ranges

SHORT_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r"}
RAW_IN_JSON = charsets.complement(charsets.ranges([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Row:
    """One part after the other; none is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; any number above `least` where `most` is None."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """A rule of a grammar, by its name; regular expressions have none."""

    name: str


Node = Chars | Row | Choice | Repeat | Reference
EMPTY = Row(())
ANYTHING = Repeat(Chars(charsets.ALL), 0, None)


def literal(text: str) -> Node:
    return Row(tuple(Chars(charsets.characters(char)) for char in text))


def choice(options: Iterable[Node]) -> Node:
    """One of several; an option that is empty makes the rest optional, which every dialect can write. Characters among
    them are one set, so that a text is not read twice."""
    given = _joined_chars(tuple(dict.fromkeys(options)))
    full = tuple(option for option in given if option != EMPTY)
    if not full:
        return EMPTY
    node = full[0] if len(full) == 1 else Choice(full)
    return node if len(full) == len(given) else Repeat(node, 0, 1)


def _joined_chars(options: tuple[Node, ...]) -> tuple[Node, ...]:
    chars = [option for option in options if isinstance(option, Chars)]
    if len(chars) < 2:
        return options
    joined = Chars(charsets.ranges(pair for option in chars for pair in option.ranges))
    return (joined, *(option for option in options if not isinstance(option, Chars)))


def repeat(part: Node, least: int, most: int | None) -> Node:
    if part == EMPTY or most == 0:
        return EMPTY
    if (least, most) == (1, 1):
        return part
    if isinstance(part, Repeat) and part.most is None and part.least <= 1 and most is None:
        return Repeat(part.part, min(part.least, least), None)  # (a*)+ and the like: the same texts, read one way only
    return Repeat(part, least, most)


def pattern_text(node: Node) -> str:
    """The node as a regular expression."""
    match node:
        case Chars(found):
            return charsets.class_text(found)
        case Row(parts):
            return "".join(f"(?:{pattern_text(p)})" if isinstance(p, Choice) else pattern_text(p) for p in parts)
        case Choice(options):
            return "|".join(map(pattern_text, options))
        case Repeat(part, least, most):
            inner = pattern_text(part)
            return (inner if isinstance(part, Chars) else f"(?:{inner})") + quantifier(least, most)
        case Reference(name):
            raise ValueError(f"the rule {name} is no regular expression")


def positions(node: Node) -> int:
    """Characters with all repeats written out: about the states of an automaton."""
    match node:
        case Chars() | Reference():
            return 1
        case Row(parts):
            return sum(map(positions, parts))
        case Choice(options):
            return sum(map(positions, options))
        case Repeat(part, least, most):
            return positions(part) * max(least, most or 0, 1)


def length_bounds(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters of a text; no most where there is no end to them."""
    match node:
        case Chars():
            return 1, 1
        case Row(parts):
            bounds = [length_bounds(part) for part in parts]
            return sum(low for low, _ in bounds), _total([high for _, high in bounds])
        case Choice(options):
            bounds = [length_bounds(option) for option in options]
            highs = [high for _, high in bounds]
            return min(low for low, _ in bounds), None if None in highs else max(high or 0 for high in highs)
        case Repeat(part, least, most):
            low, high = length_bounds(part)
            return low * least, None if most is None or high is None else high * most
        case Reference():
            return 0, None


def in_json(node: Node) -> Node:
    """The same texts as they stand between the quotes of a JSON string.

    Control characters without a short escape are left to classes of nothing else: `.` may go without them.
    """
    match node:
        case Chars(found):
            raw = charsets.intersection(found, RAW_IN_JSON)
            short = [literal(text) for code, text in SHORT_ESCAPES.items() if _holds(found, code)]
            if raw or short:
                return choice([*([Chars(raw)] if raw else []), *short])
            return choice(literal(f"\\u{code:04x}") for code in range(0x20) if _holds(found, code))
        case Row(parts):
            return Row(tuple(map(in_json, parts)))
        case Choice(options):
            return Choice(tuple(map(in_json, options)))
        case Repeat(part, least, most):
            return Repeat(in_json(part), least, most)
        case Reference():
            return node


def _total(highs: list[int | None]) -> int | None:
    return None if None in highs else sum(high or 0 for high in highs)


def quantifier(least: int, most: int | None) -> str:
    """How often, in the spelling that all back ends read right: xgrammar takes `(ca*)?` in a schema for `(c?a*)`."""
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case _, None:
            return f"{{{least},}}"
        case _:
            return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _holds(found: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in found)

"""A regular expression or a rule as a tree, and what is made of it: text, a size, its JSON form.

Text is written so that every back end reads it alike: explicit classes, plain groups, counted repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bough.constrained import charsets
from bough.constrained.charsets import Ranges

SHORT_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r"}
RAW_IN_JSON = charsets.complement(charsets.ranges([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))


@dataclass(frozen=True, slots=True)
class Chars:
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


@dataclass(frozen=True, slots=True)
class Token:
    """What a back end that splits text into lexemes reads as one of them; to others it is its part."""

    part: Node


@dataclass(frozen=True, slots=True)
class Meet:
    """The texts that all of some patterns match, and none of others."""

    all_of: tuple[Node, ...]
    none_of: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A JSON string, quotes and all, whose characters match a pattern, each spelt in one way, so that a name is the
    same name everywhere. `free` strings may use every escape."""

    pattern: Node
    free: bool = False


@dataclass(frozen=True, slots=True)
class JsonNumber:
    """A number that llguidance writes from a JSON schema of its own reading; no other back end can."""

    schema: str


Node = Chars | Row | Choice | Repeat | Reference | Token | Meet | Text | JsonNumber
EMPTY = Row(())
ANYTHING = Repeat(Chars(charsets.ALL), 0, None)


def literal(text: str) -> Node:
    return Row(tuple(Chars(charsets.characters(char)) for char in text))


def only_char(node: Node) -> str | None:
    if isinstance(node, Chars) and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return chr(node.ranges[0][0])
    return None


def choice(options: Iterable[Node]) -> Node:
    """One of several; an option that is empty makes the rest optional, which every dialect can write. Characters among
    them are one set, so that a text is not read twice."""
    given = tuple(dict.fromkeys(options))
    chars = [option for option in given if isinstance(option, Chars)]
    if len(chars) > 1:
        joined = Chars(charsets.ranges(pair for option in chars for pair in option.ranges))
        given = (joined, *(option for option in given if not isinstance(option, Chars)))
    full = tuple(option for option in given if option != EMPTY)
    if not full:
        return EMPTY
    node = full[0] if len(full) == 1 else Choice(full)
    return node if len(full) == len(given) else repeat(node, 0, 1)


def repeat(part: Node, least: int, most: int | None) -> Node:
    if part == EMPTY or most == 0:
        return EMPTY
    if (least, most) == (1, 1):
        return part
    if isinstance(part, Repeat) and part.least <= 1 and (least, most) == (0, 1):
        return Repeat(part.part, 0, part.most)
    if isinstance(part, Repeat) and part.most is None and part.least <= 1 and most is None:
        return Repeat(part.part, min(part.least, least), None)  # (a*)+ and the like: the same texts, read one way only
    return Repeat(part, least, most)


def pattern_text(node: Node) -> str:
    match node:
        case Chars(found):
            return charsets.class_text(found)
        case Row(parts):
            return "".join(f"(?:{pattern_text(p)})" if _is_choice(p) else pattern_text(p) for p in parts)
        case Choice(options):
            return "|".join(map(pattern_text, options))
        case Repeat(part, least, most):
            inner = pattern_text(part)
            return (inner if isinstance(part, Chars) else f"(?:{inner})") + quantifier(least, most)
        case Token(part):
            return pattern_text(part)
        case _:
            raise TypeError(f"{type(node).__name__} is not a regular expression by itself")


def positions(node: Node) -> int:
    """Characters with all repeats written out: about the states of an automaton."""
    match node:
        case Chars() | Reference() | JsonNumber():
            return 1
        case Row(parts) | Choice(parts):
            return sum(map(positions, parts))
        case Token(part) | Text(part):
            return positions(part)
        case Meet(all_of, none_of):
            return sum(map(positions, (*all_of, *none_of)))
        case Repeat(part, least, most):
            return positions(part) * max(least, most or 0, 1)


def parts_of(node: Node) -> Iterator[Node]:
    yield node
    match node:
        case Row(parts) | Choice(parts):
            for part in parts:
                yield from parts_of(part)
        case Repeat(part) | Token(part):
            yield from parts_of(part)


def in_json(node: Node, whole: bool = False) -> Node:
    """The same texts between the quotes of a JSON string, each character spelt in one way. Control characters without a
    short escape are left out of classes that hold others too, unless the `whole` of a class is needed."""
    match node:
        case Chars(found):
            raw = charsets.intersection(found, RAW_IN_JSON)
            short = [literal(text) for code, text in SHORT_ESCAPES.items() if charsets.holds(found, code)]
            options = [*([Chars(raw)] if raw else []), *short]
            if whole or not raw:
                rest = (code for code in range(0x20) if code not in SHORT_ESCAPES and charsets.holds(found, code))
                options += [literal(f"\\u{code:04x}") for code in rest]
            return choice(options)
        case Row(parts):
            return Row(tuple(in_json(part, whole) for part in parts))
        case Choice(options):
            return Choice(tuple(in_json(option, whole) for option in options))
        case Repeat(part, least, most):
            return Repeat(in_json(part, whole), least, most)
        case Token(part):
            return Token(in_json(part, whole))
        case Meet(all_of, none_of):
            return Meet(
                tuple(in_json(part, whole) for part in all_of), tuple(in_json(part, whole=True) for part in none_of)
            )
        case _:
            return node


def _is_choice(node: Node) -> bool:
    return isinstance(node, Choice) or (isinstance(node, Token) and _is_choice(node.part))


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

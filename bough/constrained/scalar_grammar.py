"""Strings, numbers and names of a plain schema as nodes of a grammar.

Lowering asks here too whether there is such a string or number at all. Automata are cached, so asking twice costs
little.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from bough.constrained import charsets, numbers
from bough.constrained.automata import TooLarge, deterministic
from bough.constrained.pattern_tree import EMPTY, Chars, Meet, Node, Repeat, Row, Text, Token, choice
from bough.constrained.regexes import parse_regex

MAX_NAME = 48  # characters of a name that a further name must differ from it in
MAX_TOLD_APART = 400  # and of all names together
NAME_CHARS = charsets.difference(charsets.ALL, charsets.ranges([(0, 0x1F)]))  # nobody names a property by a newline
ANY_NAME = Repeat(Chars(NAME_CHARS), 0, None)


def spelt(value: Any) -> str:
    """A value as JSON, in the one spelling that it has here; only what has no UTF-8 is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if all(not "\ud800" <= char <= "\udfff" for char in text) else json.dumps(value)


# ---- strings


def string_node(plain: Mapping[str, Any]) -> Text:
    """A string that patterns or lengths describe, or any."""
    patterns = [plain["pattern"]] if "pattern" in plain else [part["pattern"] for part in plain.get("allOf", ())]
    parts: list[Node] = [parse_regex(pattern) for pattern in patterns]
    if not parts or "minLength" in plain or "maxLength" in plain:
        parts.append(Repeat(Chars(charsets.ALL), plain.get("minLength", 0), plain.get("maxLength")))
    return Text(parts[0], free=not patterns) if len(parts) == 1 else Text(Meet(tuple(parts)))


def has_text(text: Text) -> bool:
    """Whether there is such a string. Patterns that are too large to be joined here are left to llguidance."""
    try:
        return not isinstance(text.pattern, Meet) or not deterministic(text.pattern).empty
    except TooLarge:
        return True


# ---- names of properties


def all_names_but(names: Iterable[str]) -> Node:
    """Every name but these. Of many or long names only the beginnings are told apart, and none may begin so."""
    depth = MAX_NAME
    kept = {name[:depth] for name in names}
    while sum(map(len, kept)) > MAX_TOLD_APART and depth > 1:
        depth //= 2
        kept = {name[:depth] for name in kept}
    return _all_but(kept, depth)


def _all_but(names: set[str], depth: int) -> Node:
    firsts = sorted({name[0] for name in names if name})
    others = charsets.difference(NAME_CHARS, charsets.characters("".join(firsts)))
    options: list[Node] = [] if "" in names else [EMPTY]
    options.append(Row((Chars(others), ANY_NAME)))
    for first in firsts if depth > 1 else ():
        rest = {name[1:] for name in names if name[:1] == first}
        options.append(Row((Chars(charsets.characters(first)), _all_but(rest, depth - 1))))
    return choice(options)


def name_node(entry: Mapping[str, Any]) -> Text:
    """The names of a class of properties: by all of some patterns, none of others, and none of some names."""
    parts = [parse_regex(pattern) for pattern in entry["all"]]
    without = [parse_regex(pattern) for pattern in entry["none"]]
    if entry["but"]:
        parts.append(all_names_but(entry["but"]))
    if without or not parts:
        parts.append(ANY_NAME)
    return Text(Meet(tuple(parts), tuple(without)) if len(parts) > 1 or without else parts[0])


# ---- numbers


def number_node(plain: Mapping[str, Any]) -> Node | None:
    """A number of the kind that a plain schema describes; None where there is none."""
    found = numbers.Range(
        plain.get("exclusiveMinimum", plain.get("minimum")),
        plain.get("exclusiveMaximum", plain.get("maximum")),
        "exclusiveMinimum" in plain,
        "exclusiveMaximum" in plain,
    )
    if "multipleOf" in plain:
        return numbers.multiples(found, Fraction(str(plain["multipleOf"])), plain["type"] == "integer")
    pattern = numbers.whole(found) if plain["type"] == "integer" else numbers.decimal(found)
    return None if pattern is None else Token(pattern)

"""What is made of an automaton: a pattern again, where that stays small, by taking out one state after the other.

And with it the regular expressions of strings and numbers, for back ends that read such (`regular`).
"""

from __future__ import annotations

from functools import lru_cache

from bough.constrained import charsets
from bough.constrained.automata import TooLarge, deterministic
from bough.constrained.dfa import Dfa
from bough.constrained.pattern_tree import (
    EMPTY,
    RAW_IN_JSON,
    Chars,
    Meet,
    Node,
    Repeat,
    Row,
    Text,
    choice,
    in_json,
    literal,
    positions,
    repeat,
)
from bough.constrained.regexes import parse_regex

MAX_ESCAPED = 8  # characters of a counted string that may be escapes: outlines-core doubles its work for each
MAX_PATTERN = 3_000  # characters of a pattern that an automaton becomes
CHARACTER = choice([Chars(RAW_IN_JSON), parse_regex('\\\\(?:["\\\\/bfnrt]|u[0-9A-CE-F][0-9A-F]{3})')])
QUOTE = literal('"')


def regular(node: Text | Dfa | Meet) -> Node:
    """A string, a number or joined patterns as one regular expression; `TooLarge` where that would be a long one."""
    match node:
        case Text(Repeat(Chars(charsets.ALL), least, most), free=True):
            counts = max(least, most or 0) > MAX_ESCAPED
            return quoted(repeat(Chars(RAW_IN_JSON) if counts else CHARACTER, least, most))
        case Text(Meet() as pattern):
            return quoted(in_json(regular(pattern)))
        case Text(pattern):
            return quoted(in_json(pattern))
        case Dfa():
            return pattern_of(node)
        case Meet():
            return pattern_of(deterministic(node))


def quoted(node: Node) -> Node:
    return Row((QUOTE, node, QUOTE))


@lru_cache(256)
def pattern_of(dfa: Dfa) -> Node:
    """The automaton as one pattern; `TooLarge` where that would be a long one."""
    start, end = -1, -2
    edges: dict[int, dict[int, Node]] = {start: {0: EMPTY}, end: {}}
    for state, row in enumerate(dfa.edges):
        edges[state] = {target: Chars(found) for found, target in row}
        if state in dfa.accepting:
            edges[state][end] = EMPTY
    left = set(range(len(dfa.edges)))
    while left:
        state = min(left, key=lambda one: _ways_through(one, edges))
        left.discard(state)
        _take_out(state, edges)
        if sum(positions(node) for row in edges.values() for node in row.values()) > MAX_PATTERN:
            raise TooLarge
    return edges[start][end]


def _ways_through(state: int, edges: dict[int, dict[int, Node]]) -> int:
    ways_in = sum(state in row for source, row in edges.items() if source != state)
    return ways_in * len(edges[state])


def _take_out(state: int, edges: dict[int, dict[int, Node]]) -> None:
    """Writes every way through a state as a way past it."""
    out = edges.pop(state)
    again = repeat(out.pop(state), 0, None) if state in out else EMPTY
    for row in edges.values():
        if state in row:
            before = row.pop(state)
            for target, after in out.items():
                through = _in_a_row(before, again, after)
                row[target] = choice([row[target], through]) if target in row else through


def _in_a_row(*nodes: Node) -> Node:
    parts = [part for node in nodes for part in (node.parts if isinstance(node, Row) else (node,))]
    return parts[0] if len(parts) == 1 else Row(tuple(parts))

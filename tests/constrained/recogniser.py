"""A slow and plain judge of grammars: which ends can a rule reach from a position? It shares no code with any back end.

It reads the grammar with `parse_ebnf`, whose trees it interprets directly, growing the sets of ends until they stand
still, so that left recursion is no matter.
"""

from __future__ import annotations

from bough.constrained.ebnf import ROOT, parse_ebnf
from bough.constrained.pattern_tree import Chars, Choice, Node, Reference, Repeat, Row


def recognises(grammar: str, text: str) -> bool:
    """Whether the grammar derives exactly this text."""
    rules = parse_ebnf(grammar)
    ends: dict[tuple[str, int], set[int]] = {(name, at): set() for name in rules for at in range(len(text) + 1)}
    changed = True
    while changed:
        changed = False
        for (name, at), known in ends.items():
            found = _ends(rules[name], at, text, ends)
            if not found <= known:
                known |= found
                changed = True
    return len(text) in ends[ROOT, 0]


def _ends(node: Node, at: int, text: str, ends: dict[tuple[str, int], set[int]]) -> set[int]:
    match node:
        case Chars(ranges):
            fits = at < len(text) and any(low <= ord(text[at]) <= high for low, high in ranges)
            return {at + 1} if fits else set()
        case Reference(name):
            return set(ends[name, at])
        case Row(parts):
            reached = {at}
            for part in parts:
                reached = {end for start in reached for end in _ends(part, start, text, ends)}
            return reached
        case Choice(options):
            return {end for option in options for end in _ends(option, at, text, ends)}
        case Repeat(part, least, most):
            reached, found, times = {at}, {at} if least == 0 else set(), 0
            while reached and (most is None or times < most):
                times += 1
                reached = {end for start in reached for end in _ends(part, start, text, ends)}
                if times >= least:
                    if reached <= found and times > least + len(text) + 1:
                        break
                    found |= reached
                if times > least + len(text) + 1:
                    break
            return found
        case _:
            raise TypeError(f"{type(node).__name__} is in no grammar that a client writes")

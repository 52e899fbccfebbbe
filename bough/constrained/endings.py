"""Rules without the parts that never come to an end.

`root ::= root` derives no text, and an object that must contain an object of its own kind has no last one. A model that
entered such a part could only run into a limit. So these parts are removed where there is another way; where there is
none, the root rule is missing from the result, and the caller refuses the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping

from bough.constrained.pattern_tree import EMPTY, Choice, Node, Reference, Repeat, Row, choice


def ending_rules(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules that derive some text, each without the options that derive none."""
    ending: set[str] = set()
    order = list(rules)
    while True:
        before = len(ending)
        for name in order:
            if name not in ending and _cut_node(rules[name], ending) is not None:
                ending.add(name)
        if len(ending) == before:
            break
        order.reverse()  # rules mostly refer to earlier ones, or mostly to later ones
    cut = {name: _cut_node(rules[name], ending) for name in rules if name in ending}
    return {name: node for name, node in cut.items() if node is not None}


def _cut_node(node: Node, ending: set[str]) -> Node | None:
    """The node without options that never end; None if nothing is left."""
    match node:
        case Reference(name):
            return node if name in ending else None
        case Row(parts):
            kept = [_cut_node(part, ending) for part in parts]
            return None if None in kept else Row(tuple(part for part in kept if part is not None))
        case Choice(options):
            left = [cut for option in options if (cut := _cut_node(option, ending)) is not None]
            return choice(left) if left else None
        case Repeat(part, least, most):
            inner = _cut_node(part, ending)
            if inner is None:
                return EMPTY if least == 0 else None
            return Repeat(inner, least, most)
    return node

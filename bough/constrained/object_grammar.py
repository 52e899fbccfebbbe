"""The members of an object as rules: named ones in their order, each there or not, then others; counted if need be.

A member that may be missing changes who comes first, and so where a comma stands. Written out in one piece that grows
with the square of their number; as rules that say "one of these from here on, and what may follow it", in step with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.constrained.pattern_tree import EMPTY, Node, Reference, Row, choice, repeat

Rules = dict[str, Node]
Counts = tuple[int, int | None]  # how many members there may be


@dataclass(frozen=True, slots=True)
class Member:
    """A named property with its value."""

    node: Node
    required: bool


def object_rules(
    members: Sequence[Member], others: Node | None, counts: Counts, comma: Node, prefix: str
) -> tuple[Node, Rules]:
    """What stands between the braces, and the rules that it refers to."""
    least, most = counts
    required = sum(member.required for member in members)
    if least <= required and most is None:
        return _one_from_here_on(members, others, comma, prefix)
    return _counted(members, others, counts, comma, prefix)


def _one_from_here_on(members: Sequence[Member], others: Node | None, comma: Node, prefix: str) -> tuple[Node, Rules]:
    """Behind a comma stands one of the members from here on, so that a comma or a brace is all that can follow one."""
    rules: Rules = {}
    more = EMPTY if others is None else repeat(Row((comma, others)), 0, None)
    one: Node | None = None if others is None else _row(others, more)
    then, needed = more, False
    for at in range(len(members) - 1, -1, -1):
        here = _row(members[at].node, then)
        needed = needed or members[at].required
        one = here if members[at].required or one is None else choice([here, one])
        if at and not members[at - 1].required:  # it will be named twice: behind that member, and in its place
            rules[f"{prefix}.{at}"] = one
            one = Reference(f"{prefix}.{at}")
        then = _row(comma, one) if needed else repeat(_row(comma, one), 0, 1)
    if one is None:
        return EMPTY, rules
    return one if needed else repeat(one, 0, 1), rules


def _row(one: Node, other: Node) -> Node:
    parts = [part for node in (one, other) for part in (node.parts if isinstance(node, Row) else (node,))]
    return Row(tuple(parts))


def _counted(
    members: Sequence[Member], others: Node | None, counts: Counts, comma: Node, prefix: str
) -> tuple[Node, Rules]:
    """A rule for each place and number of members written so far; further ones are not told apart from enough."""
    least, most = counts
    enough = least if most is None else max(most, 1)
    rules: Rules = {}
    after = [_rest(others, least - written, most, written, comma) for written in range(enough + 1)]
    for at in range(len(members) - 1, -1, -1):
        here: list[Node | None] = []
        for written in range(enough + 1):
            options: list[Node] = []
            then = after[min(written + 1, enough)]
            if then is not None and (most is None or written < most):
                options.append(_row(_row(comma, members[at].node) if written else members[at].node, then))
            skipped = after[written]
            if skipped is not None and not members[at].required:
                options.append(skipped)
            here.append(_named(options, rules, f"{prefix}.{at}.{written}"))
        after = here
    assert after[0] is not None, "lowering leaves no object that cannot be written"
    return after[0], rules


def _rest(others: Node | None, missing: int, most: int | None, written: int, comma: Node) -> Node | None:
    """What may follow the named members, where so many are missing yet."""
    room = None if most is None else most - written
    if others is None or room == 0:
        return EMPTY if missing <= 0 else None
    missing = max(0, missing)
    if written:
        return repeat(Row((comma, others)), missing, room)
    more = repeat(Row((comma, others)), max(0, missing - 1), None if room is None else room - 1)
    return _row(others, more) if missing else repeat(_row(others, more), 0, 1)


def _named(options: list[Node], rules: Rules, name: str) -> Node | None:
    if not options:
        return None
    node = choice(options)
    if node == EMPTY or isinstance(node, Reference):
        return node
    rules[name] = node
    return Reference(name)

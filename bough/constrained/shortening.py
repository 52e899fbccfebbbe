"""Patterns with their lengths cut: what is left of `maxLength` where counting beside a pattern would take too much.

An automaton that counts while it matches has a state for every count and place of the pattern. Where that is too many,
repeats of the pattern are bounded instead, so that no text is too long: all texts of the result match, and some that
the pattern and the length would allow are left out.
"""

from __future__ import annotations

from bough.constrained.pattern_tree import Chars, Choice, Node, Repeat, Row, choice, length_bounds, repeat

A_WORD = 16  # characters that a repeated part may have at least, if there is room


def counted(node: Node, least: int, most: int | None) -> Node | None:
    """The texts of so many characters, exactly, where that is a matter of one repeat; else None."""
    if isinstance(node, Repeat) and isinstance(node.part, Chars):
        highest = [bound for bound in (node.most, most) if bound is not None]
        low, high = max(node.least, least), min(highest, default=None)
        return None if high is not None and low > high else repeat(node.part, low, high)
    return None


def shortened(node: Node, most: int) -> Node | None:
    """Texts of a pattern that have at most so many characters; None where none is found."""
    low, high = length_bounds(node)
    if high is not None and high <= most:
        return node
    if low > most:
        return None
    match node:
        case Row(parts):
            return _row(parts, most)
        case Choice(options):
            kept = [short for option in options if (short := shortened(option, most)) is not None]
            return choice(kept) if kept else None
        case Repeat(part, least, highest):
            return _repeat(part, least, highest, most)
    return None


def _row(parts: tuple[Node, ...], most: int) -> Node | None:
    """What is spare beyond the shortest text is shared out, first to parts that need little of it."""
    bounds = [length_bounds(part) for part in parts]
    spare = most - sum(low for low, _ in bounds)
    needs = {at: most if high is None else high - low for at, (low, high) in enumerate(bounds)}
    kept: dict[int, Node] = {}
    for left, at in enumerate(sorted(needs, key=lambda at: needs[at])):
        given = min(needs[at], spare // (len(parts) - left))
        short = shortened(parts[at], bounds[at][0] + given)
        if short is None:
            return None
        spare -= given
        kept[at] = short
    return Row(tuple(kept[at] for at in range(len(parts))))


def _repeat(part: Node, least: int, highest: int | None, most: int) -> Node | None:
    """Fewer times, and a part that has no end of its own gets one: about as long as it may come often."""
    low, high = length_bounds(part)
    if high is None or high * max(1, least) > most:
        room = most // max(1, least)
        part_or_none = shortened(part, room if least > 1 else max(low, min(room, max(A_WORD, int(most**0.5)))))
        if part_or_none is None:
            return None
        part, high = part_or_none, length_bounds(part_or_none)[1]
    if not high:
        return part
    times = most // high
    return repeat(part, least, times if highest is None else min(times, highest)) if times >= least else None

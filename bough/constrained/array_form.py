"""The plain form of arrays: first items, the others, and how many there may be.

Tuples are written `prefixItems` and `items` today; earlier drafts wrote a list in `items`, and `additionalItems`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.constrained.limits import MAX_ITEMS
from bough.constrained.schema_parts import NO_KEYWORDS, Part, Parts, Plain, least_and_most, said
from bough.constrained.schema_source import join

if TYPE_CHECKING:
    from bough.constrained.schema_lowering import Lowering

Layout = tuple[list[Part], Part | None]  # the schemas of the first items, and of all that follow


def array_form(lowering: Lowering, parts: Parts, name: str) -> Plain | None:
    least, most = least_and_most(lowering, parts, "minItems", "maxItems", MAX_ITEMS)
    layouts = [_layout(lowering, part) for part in parts]
    prefix: list[Plain] = []
    for index in range(max(len(first) for first, _ in layouts)):
        item = lowering.lower(_at(layouts, index))
        if item is None:
            break
        prefix.append(item)
    else:
        rest = lowering.lower([then for _, then in layouts if then is not None])
        return _array(lowering, parts, prefix, rest, least, most)
    return _array(lowering, parts, prefix, None, least, most)


def _array(
    lowering: Lowering, parts: Parts, prefix: list[Plain], rest: Plain | None, least: int, most: int | None
) -> Plain | None:
    if rest is None:
        most = len(prefix) if most is None else min(most, len(prefix))
    if most is not None:
        prefix = prefix[:most]
        if least > most:
            return None
    _note_gaps(lowering, parts, most)
    plain: Plain = {"type": "array"}
    if prefix:
        plain["prefixItems"] = prefix
    plain["items"] = False if rest is None or (prefix and most == len(prefix)) else rest
    if least:
        plain["minItems"] = least
    if most is not None:
        plain["maxItems"] = most
    return plain


def _layout(lowering: Lowering, part: Part) -> Layout:
    node, pointer = lowering.node(part), part[0]
    keyword, then = ("prefixItems", "items")
    if isinstance(node.get("items"), list):
        keyword, then = ("items", "additionalItems")
    first = [(join(pointer, keyword, index), NO_KEYWORDS) for index in range(len(node.get(keyword, ())))]
    return first, (join(pointer, then), NO_KEYWORDS) if then in node else None


def _at(layouts: list[Layout], index: int) -> list[Part]:
    found = [first[index] if index < len(first) else then for first, then in layouts]
    return [part for part in found if part is not None]


def _note_gaps(lowering: Lowering, parts: Parts, most: int | None) -> None:
    for pointer, value in said(lowering, parts, "uniqueItems"):
        if value and (most is None or most > 1):
            lowering.gap(pointer, "uniqueItems")
    for part in parts:
        node = lowering.node(part)
        if "contains" in node and (node.get("minContains", 1) > 0 or "maxContains" in node):
            lowering.gap(part[0], "contains")
    for pointer, value in said(lowering, parts, "unevaluatedItems"):
        if value is not True and value != {}:
            lowering.gap(pointer, "unevaluatedItems")

"""What lowering works with: the parts that hold at one place of the answer, and the plain schemas made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from bough.constrained.limits import MAX_POSITIONS
from bough.constrained.pattern_tree import Node, pattern_text, positions
from bough.constrained.regexes import PatternError, parse_regex
from bough.constrained.schema_source import SchemaSource

Plain = dict[str, Any]
Part = tuple[str, frozenset[str]]  # where a subschema stands, and the keywords of it that are dealt with elsewhere
Parts = tuple[Part, ...]
NO_KEYWORDS: frozenset[str] = frozenset()


class Lowering(Protocol):
    """What the forms of types ask of the walk over a schema (`schema_lowering`)."""

    source: SchemaSource

    def gap(self, pointer: str, keyword: str, reason: str = ...) -> None:
        """Records a keyword that is not enforced."""

    def node(self, part: Part) -> dict[str, Any]: ...

    def lower(self, parts: Iterable[Part]) -> Plain | None:
        """What satisfies all the parts; None where nothing does."""

    def accepts(self, pointer: str, value: Any, keyword: str) -> bool: ...


def said(lowering: Lowering, parts: Parts, keyword: str) -> Iterator[tuple[str, Any]]:
    """Where a keyword stands among the parts, and its value."""
    for part in parts:
        node = lowering.node(part)
        if keyword in node:
            yield part[0], node[keyword]


def pattern_for(tree: Node) -> str:
    """A pattern in a plain schema: anchored, and in the one dialect."""
    return f"^(?:{pattern_text(tree)})$"


def read_pattern(lowering: Lowering, pointer: str, keyword: str, pattern: str) -> Node | None:
    """The tree of a client's pattern, which matches any part of a text; a gap where it cannot be enforced."""
    try:
        tree = parse_regex(pattern, search=True, field=lowering.source.field)
    except PatternError as error:
        lowering.gap(pointer, keyword, f"cannot be enforced: {error.reason}")
        return None
    if positions(tree) > MAX_POSITIONS:
        lowering.gap(
            pointer, keyword, f"cannot be enforced: its repeats written out, it has over {MAX_POSITIONS} parts"
        )
        return None
    return tree


def least_and_most(
    lowering: Lowering, parts: Parts, least: str, most: str, limit: int = MAX_POSITIONS
) -> tuple[int, int | None]:
    """The tightest of counts that several parts give; a gap where one is too large to be counted."""
    found: dict[str, list[int]] = {least: [], most: []}
    for keyword, values in found.items():
        for pointer, value in said(lowering, parts, keyword):
            if value > limit:
                lowering.gap(pointer, keyword, f"cannot be enforced: nothing is counted beyond {limit} here")
            else:
                values.append(int(value))
    return max(found[least], default=0), min(found[most], default=None)


def constant(value: Any) -> Plain:
    """One value, its objects and arrays spelt out, so that they are spaced like all others."""
    if isinstance(value, dict):
        properties = {name: constant(inner) for name, inner in value.items()}
        return {
            "type": "object", "properties": properties, "required": list(value), "additionalProperties": False,
        }  # fmt: skip
    if isinstance(value, list):
        items = [constant(inner) for inner in value]
        return {
            "type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items),
        }  # fmt: skip
    return {"enum": [value]}


def any_of(options: list[Plain]) -> Plain | None:
    """One of the options, nested alternatives joined; None if there is none."""
    inners = [inner for option in options for inner in (option["anyOf"] if option.keys() == {"anyOf"} else [option])]
    flat = list({json.dumps(inner): inner for inner in inners}.values())
    if {} in flat:
        return {}
    if not flat:
        return None
    return flat[0] if len(flat) == 1 else {"anyOf": flat}

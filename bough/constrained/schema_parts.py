"""What lowering works with: the parts that hold at one place of the answer, and the plain schemas made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bough.constrained.pattern_tree import Node, in_json, pattern_text

if TYPE_CHECKING:
    from bough.constrained.schema_lowering import Lowering

Plain = dict[str, Any]
Part = tuple[str, frozenset[str]]  # where a subschema stands, and the keywords of it that are dealt with elsewhere
Parts = tuple[Part, ...]
NO_KEYWORDS: frozenset[str] = frozenset()


def said(lowering: Lowering, parts: Parts, keyword: str) -> Iterator[tuple[str, Any]]:
    """Where a keyword stands among the parts, and its value."""
    for part in parts:
        node = lowering.node(part)
        if keyword in node:
            yield part[0], node[keyword]


def pattern_for(lowering: Lowering, tree: Node) -> str:
    """A pattern as the back end wants it: anchored, and escaped for JSON where the back end does not do that itself."""
    return f"^(?:{pattern_text(in_json(tree) if lowering.features.json_patterns else tree)})$"

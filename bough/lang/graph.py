"""A traced program as data: what happens in each state, in order, and where states branch. `pretty` prints it; as a
picture it is drawn by `drawing`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Node:
    """One thing that a program does: text, argument, variable, gen, select, begin, end, scope, image, video, join."""

    kind: str
    name: str  # or the text itself
    details: str = ""


@dataclass(slots=True)
class Fork:
    """Branches, side by side."""

    lanes: list[Lane]


@dataclass(slots=True)
class Lane:
    """What one state does."""

    items: list[Node | Fork] = field(default_factory=list)


@dataclass(slots=True)
class Graph:
    """A program. `stopped` says why it could not be followed further, if so."""

    program: str
    parameters: list[str]
    lane: Lane
    stopped: str | None = None

    def pretty(self) -> str:
        """The graph as lines of text."""
        lines = [f"{self.program}({', '.join(self.parameters)})", *_lines(self.lane, "  ")]
        return "\n".join([*lines, *([f"  … {self.stopped}"] if self.stopped else [])])

    def nodes(self) -> list[Node]:
        """All nodes, branches after what comes before them."""
        return list(_nodes(self.lane))

    def to_dot(self) -> str:
        """The graph in Graphviz's language."""
        from bough.lang.drawing import to_dot

        return to_dot(self)

    def to_svg(self) -> str:
        """The graph as a picture."""
        from bough.lang.drawing import to_svg

        return to_svg(self)


def _lines(lane: Lane, indent: str) -> Iterator[str]:
    for item in lane.items:
        if isinstance(item, Node):
            shown = repr(item.name) if item.kind == "text" else item.name
            yield f"{indent}{item.kind:<8} {shown}{f'  ({item.details})' if item.details else ''}".rstrip()
            continue
        yield f"{indent}fork     {len(item.lanes)}"
        for number, branch in enumerate(item.lanes):
            yield f"{indent}  [{number}]"
            yield from _lines(branch, indent + "    ")


def _nodes(lane: Lane) -> Iterator[Node]:
    for item in lane.items:
        if isinstance(item, Node):
            yield item
        else:
            for branch in item.lanes:
                yield from _nodes(branch)

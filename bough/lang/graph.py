"""A traced program as data, and pictures of it, in Graphviz's language and as SVG.

Each state is a column of boxes; branches stand side by side under the place where they begin. Dashed lines lead from a
variable to where it is used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias
from xml.sax.saxutils import escape

COLOURS = {"gen": "#d5ecd4", "select": "#cfe3f5", "argument": "#f7e3c3", "variable": "#f7e3c3", "text": "#ffffff"}
OTHER_COLOUR = "#eeeeee"
WIDTH, HEIGHT, GAP_X, GAP_Y = 190, 34, 20, 18
LONGEST_LABEL = 26


@dataclass(slots=True)
class Node:
    """One thing that a program does: text, argument, variable, gen, select, begin, end, scope, image, video, join."""

    kind: str
    name: str  # or the text itself
    details: str = ""


Lane: TypeAlias = "list[Node | tuple[Lane, ...]]"  # what a state does, in order; where it forks, its branches


@dataclass(slots=True)
class Graph:
    """A program. `stopped` says why it could not be followed further, if so."""

    program: str
    parameters: list[str]
    lane: Lane
    stopped: str | None = None

    def pretty(self) -> str:
        lines = [f"{self.program}({', '.join(self.parameters)})", *_lines(self.lane, "  ")]
        return "\n".join([*lines, *([f"  … {self.stopped}"] if self.stopped else [])])

    def to_dot(self) -> str:
        layout = Layout(self)
        lines = ["digraph program {", "  node [shape=box, style=filled, fontname=sans];"]
        for i, box in enumerate(layout.boxes):
            text = label(box.node).replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'  n{i} [label="{text}", fillcolor="{COLOURS.get(box.node.kind, OTHER_COLOUR)}"];')
        for start, end, value in layout.lines:
            lines.append(f"  n{start} -> n{end}{' [style=dashed, constraint=false]' if value else ''};")
        return "\n".join([*lines, "}"])

    def to_svg(self) -> str:
        layout = Layout(self)
        width = layout.columns * (WIDTH + GAP_X) + GAP_X
        height = (max(box.row for box in layout.boxes) + 1) * (HEIGHT + GAP_Y) + GAP_Y
        size = f'width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        return "\n".join([head, *_svg_lines(layout), *map(_svg_box, layout.boxes), "</svg>"])


def _lines(lane: Lane, indent: str) -> Iterator[str]:
    for item in lane:
        if isinstance(item, Node):
            shown = repr(item.name) if item.kind == "text" else item.name
            yield f"{indent}{item.kind:<8} {shown}{f'  ({item.details})' if item.details else ''}".rstrip()
            continue
        yield f"{indent}fork     {len(item)}"
        for number, branch in enumerate(item):
            yield f"{indent}  [{number}]"
            yield from _lines(branch, indent + "    ")


@dataclass(slots=True)
class Box:
    node: Node
    column: int
    row: int


class Layout:
    """Where the boxes of a graph stand, and the lines between them: from, to, and whether it leads to a use."""

    def __init__(self, graph: Graph) -> None:
        self.boxes: list[Box] = []
        self.lines: list[tuple[int, int, bool]] = []
        self.columns = 1
        self._written: dict[str, int] = {}  # by variable, the box that writes it
        title = self._add(Node("program", f"{graph.program}({', '.join(graph.parameters)})"), 0, 0)
        row, _ = self._place(graph.lane, [title], 0, 1)
        if graph.stopped:
            self._add(Node("stopped", f"… {graph.stopped}"), 0, row)

    def _add(self, node: Node, column: int, row: int) -> int:
        self.boxes.append(Box(node, column, row))
        self.columns = max(self.columns, column + 1)
        return len(self.boxes) - 1

    def _place(self, lane: Lane, last: list[int], column: int, row: int) -> tuple[int, list[int]]:
        """Puts a state's boxes below each other; gives the next free row and the boxes at its end."""
        for item in lane:
            if not isinstance(item, Node):
                placed = [
                    self._place(branch, last[:1], self.columns if i else column, row) for i, branch in enumerate(item)
                ]
                row = max(end_row for end_row, _ in placed)
                last = [*last[:1], *(end for _, ends in placed for end in ends if end not in last)]
                continue
            box = self._add(item, column, row)
            self.lines += [(before, box, False) for before in (last if item.kind == "join" else last[:1])]
            if item.kind == "variable" and (source := self._written.get(item.name.split("[")[0])) is not None:
                self.lines.append((source, box, True))
            if item.kind in ("gen", "select"):
                self._written[item.name] = box
            last, row = [box], row + 1
        return row, last


def label(node: Node) -> str:
    text = node.name if node.kind in ("text", "program", "stopped") else f"{node.kind} {node.name}".strip()
    text = " ".join(text.split()) or repr(text)
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"


def _corner(box: Box) -> tuple[int, int]:
    return GAP_X + box.column * (WIDTH + GAP_X), GAP_Y + box.row * (HEIGHT + GAP_Y)


def _svg_lines(layout: Layout) -> Iterator[str]:
    for start, end, value in layout.lines:
        x1, y1 = _corner(layout.boxes[start])
        x2, y2 = _corner(layout.boxes[end])
        dashed = ' stroke-dasharray="4 3"' if value else ""
        yield (
            f'<line x1="{x1 + WIDTH // 2}" y1="{y1 + HEIGHT}" x2="{x2 + WIDTH // 2}" y2="{y2}" stroke="#888"{dashed}/>'
        )


def _svg_box(box: Box) -> str:
    x, y = _corner(box)
    colour = COLOURS.get(box.node.kind, OTHER_COLOUR)
    title = escape(f"{box.node.kind}: {box.node.name} {box.node.details}".strip())
    return (
        f'<g><title>{title}</title><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{colour}" '
        f'stroke="#888"/><text x="{x + WIDTH // 2}" y="{y + HEIGHT // 2 + 4}" text-anchor="middle">'
        f"{escape(label(box.node))}</text></g>"
    )

"""A traced program as data, and pictures of it, in Graphviz's language and as SVG.

Each state is a column of boxes; branches stand side by side under the place where they begin. Dashed lines lead from a
variable to where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Fork:
    lanes: list[Lane]


@dataclass(slots=True)
class Lane:
    items: list[Node | Fork] = field(default_factory=list)


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

    def nodes(self) -> list[Node]:
        return list(_nodes(self.lane))

    def to_dot(self) -> str:
        layout = lay_out(self)
        lines = ["digraph program {", "  node [shape=box, style=filled, fontname=sans];"]
        for i, box in enumerate(layout.boxes):
            text = label(box.node).replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'  n{i} [label="{text}", fillcolor="{COLOURS.get(box.node.kind, OTHER_COLOUR)}"];')
        for start, end, value in layout.lines:
            lines.append(f"  n{start} -> n{end}{' [style=dashed, constraint=false]' if value else ''};")
        return "\n".join([*lines, "}"])

    def to_svg(self) -> str:
        layout = lay_out(self)
        width = layout.columns * (WIDTH + GAP_X) + GAP_X
        height = (max(box.row for box in layout.boxes) + 1) * (HEIGHT + GAP_Y) + GAP_Y
        size = f'width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        return "\n".join([head, *_svg_lines(layout), *map(_svg_box, layout.boxes), "</svg>"])


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


@dataclass(slots=True)
class Box:
    node: Node
    column: int
    row: int


@dataclass(slots=True)
class Layout:
    boxes: list[Box] = field(default_factory=list)
    lines: list[tuple[int, int, bool]] = field(default_factory=list)
    columns: int = 1

    def add(self, node: Node, column: int, row: int) -> int:
        self.boxes.append(Box(node, column, row))
        self.columns = max(self.columns, column + 1)
        return len(self.boxes) - 1


def lay_out(graph: Graph) -> Layout:
    layout = Layout()
    title = layout.add(Node("program", f"{graph.program}({', '.join(graph.parameters)})"), 0, 0)
    row, _ = _place(graph.lane, layout, [title], 0, 1, {})
    if graph.stopped:
        layout.add(Node("stopped", f"… {graph.stopped}"), 0, row)
    return layout


def _place(
    lane: Lane, layout: Layout, last: list[int], column: int, row: int, written: dict[str, int]
) -> tuple[int, list[int]]:
    """Puts a state's boxes below each other; gives the next free row and the boxes at its end."""
    for item in lane.items:
        if isinstance(item, Fork):
            row, ends = _place_branches(item, layout, last, column, row, written)
            joined = [end for end in ends if end not in last]
            last = [*last[:1], *joined] if joined else last
            continue
        box = layout.add(item, column, row)
        layout.lines += [(before, box, False) for before in (last if item.kind == "join" else last[:1])]
        if item.kind == "variable" and (source := written.get(item.name.split("[")[0])) is not None:
            layout.lines.append((source, box, True))
        if item.kind in ("gen", "select"):
            written[item.name] = box
        last, row = [box], row + 1
    return row, last


def _place_branches(
    fork: Fork, layout: Layout, last: list[int], column: int, row: int, written: dict[str, int]
) -> tuple[int, list[int]]:
    rows, ends = [row], []
    for number, lane in enumerate(fork.lanes):
        place = column if number == 0 else layout.columns
        end_row, end = _place(lane, layout, last[:1], place, row, written)
        rows.append(end_row)
        ends += end
    return max(rows), ends


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

"""A serving run as one HTML page that needs nothing else: tables, and panels as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bough.bench.figures import Panel
from bough.bench.report import headline, table

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 30, 42
TICKS = 5

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
  table {{ border-collapse: collapse; margin: 1rem 2rem 1rem 0; }}
  td {{ padding: .15rem .9rem .15rem 0; border-bottom: 1px solid #eee; }} td.n {{ text-align: right; }}
  .row {{ display: flex; flex-wrap: wrap; align-items: flex-start; }}
  svg {{ margin: .4rem; background: #fafaf8; border: 1px solid #e4e4e0; border-radius: 6px; }}
  svg text {{ font: 11px system-ui, sans-serif; fill: #444; }} svg .title {{ font-size: 13px; font-weight: 600; }}
</style></head><body>
<h1>{title}</h1>
<div class="row">{panels}</div>
<div class="row"><table>{figures}</table><table>{settings}</table></div>
</body></html>
"""


def html_report(result: Mapping[str, Any], settings: Mapping[str, Any], panels: Sequence[Panel]) -> str:
    return PAGE.format(
        title=escape(headline(result)),
        panels="".join(map(svg, panels)),
        figures=_rows(table(result)),
        settings=_rows([(name, str(value)) for name, value in settings.items()]),
    )


def _rows(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<tr><td>{escape(name)}</td><td class="n">{escape(value)}</td></tr>' for name, value in pairs)


def svg(panel: Panel) -> str:
    x_top, y_top = max(panel.xs, default=0.0) or 1.0, max(panel.ys, default=0.0) or 1.0

    def x_of(value: float) -> float:
        return LEFT + value / x_top * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - value / y_top * (HEIGHT - TOP - BOTTOM)

    points = [(x_of(x), y_of(y)) for x, y in zip(panel.xs, panel.ys, strict=True)]
    if panel.dots:
        drawn = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="#2a6f97"/>' for x, y in points)
    else:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn = f'<polyline points="{path}" fill="none" stroke="#2a6f97" stroke-width="1.6"/>'
    marks = "".join(
        _mark(x_of(x_top * i / TICKS), HEIGHT - BOTTOM, x_top * i / TICKS, below=True)
        + _mark(LEFT, y_of(y_top * i / TICKS), y_top * i / TICKS, below=False)
        for i in range(TICKS + 1)
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg">'
        f'<text class="title" x="{LEFT}" y="18">{escape(panel.title)}</text>{marks}{drawn}'
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x_label)}</text>'
        f'<text transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_label)}</text></svg>"
    )


def _mark(x: float, y: float, value: float, *, below: bool) -> str:
    """A tick's number and its line across the frame."""
    shown = f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"
    if below:
        return f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{shown}</text>'
    line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
    return f'{line}<text x="{x - 5:.1f}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>'

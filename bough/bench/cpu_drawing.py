"""A run of `bough bench cpu` drawn: bars in an HTML page that needs nothing else, and the same bars as a PNG."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from bough.bench.cpu_results import Comparison, text_report

COLOURS = ("#2a6f97", "#89c2d9", "#bc6c25", "#dda15e")
WIDTH, LEFT, RIGHT = 860, 230, 150
BAR, GAP, TOP = 16, 14, 34

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
  svg {{ display: block; margin: 1rem 0; background: #fafaf8; border: 1px solid #e4e4e0; border-radius: 6px; }}
  svg text {{ font: 12px system-ui, sans-serif; fill: #333; }} svg .title {{ font-size: 14px; font-weight: 600; }}
  pre {{ overflow-x: auto; font-size: 13px; }}
</style></head><body>
<h1>{title}</h1>
{bars}
<pre>{text}</pre>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, with what stands at its end. `low` and `high` show what it was in other rounds."""

    series: str
    value: float
    low: float
    high: float
    note: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """Groups of bars, one group to a row; `mark` is a line through all of them."""

    title: str
    groups: list[tuple[str, list[Bar]]]
    mark: float | None = None

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(bar.series for _, bars in self.groups for bar in bars))

    @property
    def top(self) -> float:
        return max([bar.high for _, bars in self.groups for bar in bars] + [self.mark or 0.0]) or 1.0


def charts_of(found: Comparison, base: str | None) -> list[BarChart]:
    speeds = [(case.title, [_bar(r.side, r.rates, " tok/s") for r in case.sides]) for case in found.cases]
    charts = [BarChart("Tokens per second", speeds)]
    if base is not None:
        others = [side for side in found.sides if side != base]
        ratios = [
            (case.title, [_bar(side, case.ratios(side, base), " ×", 2) for side in others]) for case in found.cases
        ]
        charts.insert(0, BarChart(f"Times as fast as {base}", ratios, mark=1.0))
    starts = [
        (result.side, [_bar(result.side, [start.total_s for start in result.starts], " s", 2)])
        for result in found.starts
    ]
    return [*charts, BarChart("Start to first token", starts)]


def _bar(series: str, values: Sequence[float], unit: str, digits: int = 1) -> Bar:
    middle = statistics.median(values)
    return Bar(series, middle, min(values), max(values), f"{middle:,.{digits}f}{unit}")


def html_page(found: Comparison, base: str | None) -> str:
    title = f"Bough on a CPU, beside {base}" if base else "Bough on a CPU"
    drawn = "\n".join(map(svg, charts_of(found, base)))
    return PAGE.format(title=escape(title), bars=drawn, text=escape(text_report(found, base)))


def svg(chart: BarChart) -> str:
    def x_of(value: float) -> float:
        return LEFT + value / chart.top * (WIDTH - LEFT - RIGHT)

    y = TOP
    drawn = []
    for label, bars in chart.groups:
        middle = y + len(bars) * BAR / 2 + 4
        drawn.append(f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>')
        for bar in bars:
            colour = COLOURS[chart.series.index(bar.series) % len(COLOURS)]
            drawn.append(
                f'<rect x="{LEFT}" y="{y}" width="{x_of(bar.value) - LEFT:.1f}" height="{BAR - 3}" fill="{colour}"/>'
                f'<line x1="{x_of(bar.low):.1f}" x2="{x_of(bar.high):.1f}" y1="{y + 6}" y2="{y + 6}" stroke="#333"/>'
                f'<text x="{x_of(bar.high) + 6:.1f}" y="{y + 11}">{escape(bar.note)}</text>'
            )
            y += BAR
        y += GAP
    if chart.mark is not None:
        at = x_of(chart.mark)
        drawn.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{y - GAP}" stroke="#b00" stroke-dasharray="4"/>'
        )
    height = y + 14
    legend = "".join(
        f'<rect x="{LEFT + 150 * i}" y="{height - 18}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>'
        f'<text x="{LEFT + 150 * i + 16}" y="{height - 9}">{escape(series)}</text>'
        for i, series in enumerate(chart.series)
    )
    return (
        f'<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">'
        f'<text class="title" x="14" y="20">{escape(chart.title)}</text>{"".join(drawn)}{legend}</svg>'
    )


def write_png(found: Comparison, base: str | None, path: str) -> bool:
    """False where matplotlib is not installed: the page shows the same."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    charts = charts_of(found, base)
    bars = [sum(len(bars) for _, bars in chart.groups) + len(chart.groups) for chart in charts]
    figure = Figure(figsize=(9, 0.24 * sum(bars) + 1.1 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(charts), 1, squeeze=False, gridspec_kw={"height_ratios": bars}).flat
    for axes, chart in zip(all_axes, charts, strict=True):
        _draw(axes, chart)
    figure.savefig(path, format="png", dpi=110)
    return True


def _draw(axes: Any, chart: BarChart) -> None:
    y = 0.0
    ticks: list[tuple[float, str]] = []
    for label, bars in chart.groups:
        ticks.append((y + (len(bars) - 1) / 2, label))
        for bar in bars:
            colour = COLOURS[chart.series.index(bar.series) % len(COLOURS)]
            named = None if len(ticks) > 1 else bar.series  # the legend takes each series once
            axes.barh(y, bar.value, 0.9, color=colour, label=named)
            axes.plot([bar.low, bar.high], [y, y], color="#333", linewidth=1)
            axes.text(bar.high + 0.01 * chart.top, y, bar.note, va="center", fontsize=8)
            y += 1.0
        y += 0.8
    if chart.mark is not None:
        axes.axvline(chart.mark, color="#b00", linestyle="--", linewidth=1)
    axes.set_yticks([place for place, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * chart.top)
    axes.set_title(chart.title, fontsize=10, loc="left")
    if len(chart.series) == len(chart.groups[0][1]):  # else each group is its own series and labelled already
        axes.legend(fontsize=8)

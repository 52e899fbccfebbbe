"""A serving run as pictures: a PNG by matplotlib, and one HTML page that holds it and the tables."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from bough.bench.backends import Record
from bough.bench.metrics import headline, table, tokens_by_second
from bough.core.errors import SettingsError

CURVE_POINTS = 200
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem }} img {{ max-width: 100% }}
td {{ padding-right: 1rem }} td + td {{ text-align: right }} div {{ display: flex; gap: 3rem }}</style>
</head><body><h1>{title}</h1><img alt="" src="data:image/png;base64,{picture}">
<div><table>{figures}</table><table>{settings}</table></div></body></html>
"""


def require_matplotlib() -> None:
    """Checked before a long run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingsError("A picture needs matplotlib; install it with `pip install 'bough[bench]'`.") from None


def draw_png(records: Sequence[Record], title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = [record for record in records if record.ok]
    firsts, totals = [record.first_s for record in good], [record.total_s for record in good]
    began = [record.began_s for record in good]
    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = list(figure.subplots(2, 3).flat)
    gaps = [gap for record in good for gap in record.gaps_s]
    times = {"Time to first token": firsts, "Gap between tokens": gaps, "Whole request": totals}
    for axes, (name, seconds) in zip(panels, times.items(), strict=False):
        shares = np.linspace(0, 1, min(CURVE_POINTS, max(2, len(seconds))))
        axes.plot(1e3 * np.quantile(seconds or [0.0], shares), shares)
        axes.set(title=name, xlabel="milliseconds", ylabel="share of all")
    panels[3].plot(tokens_by_second(good))
    panels[3].set(title="Output", xlabel="seconds", ylabel="tokens per second")
    for axes, name, seconds in ((panels[4], "Time to first token", firsts), (panels[5], "Whole request", totals)):
        axes.plot(began, [1e3 * each for each in seconds], ".", markersize=3)
        axes.set(title=f"{name} over the run", xlabel="seconds", ylabel="milliseconds")
    for axes in panels:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


def html_report(result: Mapping[str, Any], settings: Mapping[str, Any], png: bytes) -> str:
    return PAGE.format(
        title=escape(headline(result)),
        picture=base64.b64encode(png).decode(),
        figures=_rows(table(result)),
        settings=_rows([(name, str(value)) for name, value in settings.items()]),
    )


def _rows(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in pairs)

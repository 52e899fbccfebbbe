"""What the pictures of a serving run show: the same panels for the PNG and for the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bough.bench.load import Record
from bough.bench.metrics import tokens_by_second
from bough.core.errors import SettingsError

CURVE_POINTS = 200


@dataclass(frozen=True, slots=True)
class Panel:
    """One line in a frame."""

    title: str
    x_label: str
    y_label: str
    xs: list[float]
    ys: list[float]
    dots: bool = False  # points, not a line


def panels_of(records: Sequence[Record]) -> list[Panel]:
    good = [record for record in records if record.ok]
    rates = tokens_by_second(good)
    return [
        _shares("Time to first token", [record.first_s for record in good]),
        _shares("Gap between tokens", [gap for record in good for gap in record.gaps_s]),
        _shares("Whole request", [record.total_s for record in good]),
        Panel("Output", "seconds", "tokens per second", [float(i) for i in range(len(rates))], rates),
        Panel(
            "Time to first token over the run",
            "seconds",
            "milliseconds",
            [record.began_s for record in good],
            [1e3 * record.first_s for record in good],
            dots=True,
        ),
        Panel(
            "Whole request over the run",
            "seconds",
            "milliseconds",
            [record.began_s for record in good],
            [1e3 * record.total_s for record in good],
            dots=True,
        ),
    ]


def _shares(title: str, seconds: Sequence[float]) -> Panel:
    """Which share of all stays below a time."""
    shares = np.linspace(0, 1, min(CURVE_POINTS, max(2, len(seconds))))
    times = 1e3 * np.quantile(np.array(seconds), shares) if len(seconds) else np.zeros(len(shares))
    return Panel(title, "milliseconds", "share of all", times.tolist(), shares.tolist())


def draw_png(panels: Sequence[Panel], title: str, path: str) -> None:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
        axes.plot(panel.xs, panel.ys, "." if panel.dots else "-", markersize=3)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise SettingsError(f"Cannot write the picture {path}: {error.strerror}.") from None


def require_matplotlib() -> None:
    """Found out before a long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingsError("A picture needs matplotlib; install it with `pip install 'bough[bench]'`.") from None

"""Pictures of benchmarks that compare: for each panel and side the share of requests that took at most so long."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bough.bench.metrics import CURVE_POINTS, require_matplotlib
from bough.core.errors import SettingsError

Curves = Mapping[str, Mapping[str, Sequence[float]]]  # seconds, by panel and side


def add_plot_flag(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--plot", metavar="FILE", help="a PNG with the distributions of both sides (needs matplotlib)")


def check_plot(path: str | None) -> None:
    """Before a long run."""
    if path is None:
        return
    require_matplotlib()
    if not Path(path).expanduser().resolve().parent.is_dir():
        raise SettingsError(f"--plot: there is no folder {Path(path).parent}.")


def plot(path: str | None, title: str, curves: Curves) -> None:
    if path is None:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(curves), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (panel, sides) in zip(figure.subplots(1, len(curves), squeeze=False).flat, curves.items(), strict=True):
        for side, seconds in sides.items():
            shares = np.linspace(0, 1, min(CURVE_POINTS, max(2, len(seconds))))
            axes.plot(1e3 * np.quantile(list(seconds) or [0.0], shares), shares, label=side)
        axes.set(title=panel, xlabel="milliseconds", ylabel="share of all")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(Path(path).expanduser(), format="png", dpi=110)

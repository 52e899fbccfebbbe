"""From records to figures, with the names and definitions of SGLang's `bench_serving`; as text and as pictures.

TTFT: time to first token. TPOT: mean time per further token of a request. ITL: gap before each further token. E2E: the
whole request.
"""

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.bench.backends import Record
from bough.core.errors import SettingsError
from bough.core.files import table_beside

FloatArray = npt.NDArray[np.float64]
PERCENTILES = (90, 95, 99)
LINES: dict[str, str] = table_beside(__file__, "report.toml")
SPREADS = (("e2e_latency", "E2E Latency"), ("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"))
WORDS = ("mean", "median", "p90", "p95", "p99")
CURVE_POINTS = 200
PAGE = Path(__file__).with_name("report.html").read_text(encoding="utf-8")


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """All figures of a run; failed requests are only counted."""
    good = [record for record in records if record.ok]
    duration = max((r.began_s + r.total_s for r in good), default=0.0) - min((r.began_s for r in good), default=0.0)
    given, cached, made = (
        sum(getattr(record, name) for record in good) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )

    def rate(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    streamed = [record for record in good if record.gaps_s]
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "first_error": next((record.error for record in records if not record.ok), None),
        "total_input_tokens": given,
        "total_cached_tokens": cached,
        "total_output_tokens": made,
        "request_throughput": rate(len(good)),
        "input_throughput": rate(given),
        "output_throughput": rate(made),
        "total_throughput": rate(given + made),
        "max_output_tokens_per_s": max(tokens_by_second(good), default=0.0),
        "concurrency": rate(sum(record.total_s for record in good)),
        "max_concurrent_requests": peak_concurrency(good),
        **_spread("e2e_latency", [record.total_s for record in good]),
        **_spread("ttft", [record.first_s for record in good]),
        **_spread("tpot", [(r.total_s - r.first_s) / (r.output_tokens - 1) for r in streamed if r.output_tokens > 1]),
        **_spread("itl", gaps := [gap for record in good for gap in record.gaps_s]),
        "max_itl_ms": 1e3 * max(gaps, default=0.0),
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds; zeros without values."""
    values = 1e3 * np.array(seconds if len(seconds) else [0.0])
    found = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    found |= {f"p{percent}": np.percentile(values, percent) for percent in PERCENTILES}
    return {f"{word}_{name}_ms": float(value) for word, value in found.items()}


def tokens_by_second(records: Sequence[Record]) -> list[float]:
    seconds: list[FloatArray] = [np.zeros(0)]
    weights: list[FloatArray] = [np.zeros(0)]
    for record in records:
        times = record.began_s + record.first_s + np.cumsum([0.0, *record.gaps_s])
        seconds.append(times)
        # A server that puts several tokens into one chunk may not say how many: they count in equal parts.
        weights.append(np.full(len(times), record.output_tokens / len(times)))
    return [float(n) for n in np.bincount(np.concatenate(seconds).astype(np.int64), np.concatenate(weights))]


def peak_concurrency(records: Sequence[Record]) -> int:
    # An end counts before a beginning at the same moment: a closed loop never has more than its users.
    changes = [(r.began_s + r.total_s, -1) for r in records] + [(r.began_s, 1) for r in records]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


# ---- as text, in the order of SGLang's tool


def headline(result: Mapping[str, Any]) -> str:
    return f"{result['backend']}, {result['dataset_name']}: {result['completed']} requests"


def table(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(label, shown(result[name])) for name, label in LINES.items() if result.get(name) is not None]
    for name, label in SPREADS:
        rows += [(f"{word.capitalize()} {label} (ms)", shown(result[f"{word}_{name}_ms"])) for word in WORDS]
    return [*rows, ("Max ITL (ms)", shown(result["max_itl_ms"]))]


def text_report(result: Mapping[str, Any]) -> str:
    rows = table(result)
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name + ':':<{width}} {value:>14}" for name, value in rows]
    return "\n".join(["Serving benchmark result".center(width + 15, "="), *lines, "=" * (width + 15)])


def shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# ---- as pictures: a PNG by matplotlib, and one HTML page that holds it and the tables


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

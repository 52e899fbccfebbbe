"""What a run of `bough bench cpu` found: rates by load and side, and ratios of rates that were measured side by side.

A ratio is taken inside each round, where both sides met the same machine, and the median over the rounds is reported:
whatever else ran meanwhile changes both rates, but hardly their ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.bench.cpu_cases import Start

BAR_CELLS = 8  # of a ratio of 1


class SideResult(msgspec.Struct, frozen=True):
    """One side's rates under one load, round by round, in tokens per second."""

    side: str
    rates: list[float]


class CaseResult(msgspec.Struct, frozen=True):
    """All sides under one load."""

    name: str
    title: str
    sides: list[SideResult]

    def rates_of(self, side: str) -> list[float]:
        return next(result.rates for result in self.sides if result.side == side)

    def ratios(self, side: str, to: str) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.rates_of(side), self.rates_of(to), strict=True)]


class StartResult(msgspec.Struct, frozen=True):
    """One side's starts, and its memory."""

    side: str
    starts: list[Start]
    peak_bytes: int  # over all loads, every process of the side

    @property
    def median(self) -> Start:
        """The start in the middle, whole: parts of different starts do not add up."""
        return sorted(self.starts, key=lambda start: start.total_s)[(len(self.starts) - 1) // 2]


class Comparison(msgspec.Struct, frozen=True):
    """A whole run."""

    about: dict[str, Any]  # machine, versions, model, command: what is needed to repeat it
    cases: list[CaseResult]
    starts: list[StartResult]

    @property
    def sides(self) -> list[str]:
        return [start.side for start in self.starts]


def spread(values: Sequence[float]) -> str:
    """The median, with the smallest and the largest where there are several."""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}–{max(values):.2f})"


def json_report(found: Comparison, base: str | None) -> bytes:
    """The run with its ratios to `base`: by load and side, round by round and their median."""
    content: dict[str, Any] = msgspec.to_builtins(found)
    if base is not None:
        others = [side for side in found.sides if side != base]
        content["ratios"] = {
            case.name: {
                side: {"median": statistics.median(rounds := case.ratios(side, base)), "rounds": rounds}
                for side in others
            }
            for case in found.cases
        }
    return msgspec.json.format(msgspec.json.encode(content))


def text_report(found: Comparison, base: str | None) -> str:
    """Tables for a terminal; `base` is the side that ratios are to, drawn as bars."""
    lines = [f"{name}: {value}" for name, value in found.about.items()]
    lines += ["", *_table(_case_rows(found, base)), "", *_table(_start_rows(found))]
    return "\n".join(lines)


def _case_rows(found: Comparison, base: str | None) -> list[list[str]]:
    others = [side for side in found.sides if base is not None and side != base]
    rows = [["tok/s, median", *found.sides, *(f"{side} / {base}" for side in others), *([""] * len(others))]]
    for case in found.cases:
        rates = [f"{statistics.median(result.rates):,.1f}" for result in case.sides]
        ratios = [case.ratios(side, base) for side in others if base is not None]
        bars = ["█" * round(BAR_CELLS * statistics.median(rounds)) for rounds in ratios]
        rows.append([case.title, *rates, *map(spread, ratios), *bars])
    return rows


def _start_rows(found: Comparison) -> list[list[str]]:
    rows = [["start to first token, s", "all", "of which", "CPU time", "peak memory of all loads, MB"]]
    for result in found.starts:
        start = result.median
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in start.parts)
        cpu = f"{statistics.median(one.cpu_s for one in result.starts):.2f}"
        rows.append([result.side, f"{start.total_s:.2f}", parts, cpu, f"{result.peak_bytes / 1e6:,.0f}"])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

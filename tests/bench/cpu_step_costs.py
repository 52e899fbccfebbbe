"""What a step trace of an engine and its processes' CPU times tell of the steps in which a whole batch decoded."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bough.observability.step_trace import DEVICE_LANE, HOST_LANE, name_batch

HOST_PHASES = ("messages", "plan", "launch", "masks", "commit")  # waiting is none: the step runs meanwhile


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one step: on the clock, the middle one of all steps, and of CPU time, their mean."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """A step as the engine sees it; what the scheduler's loop and other processes do overlaps with the executor."""

    period_s: float  # from the beginning of one step to that of the next
    device_s: float  # how long the executor worked on it
    host: dict[str, Cost]  # by phase of the scheduler's loop
    process_s: dict[str, float]  # CPU time of each process, per step


def cpu_by_role() -> dict[str, float]:
    """CPU time so far: of this process, which is the client, and of the engine's."""
    this = psutil.Process()
    spent = {"client": cpu_of(this)}
    for child in this.children(recursive=True):
        role = next((word for word in child.cmdline() if word.startswith("bough::")), "other")
        spent[role.removeprefix("bough::")] = cpu_of(child)
    return spent


def cpu_of(process: psutil.Process) -> float:
    """The CPU time that a process has taken so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def read_trace(text: str) -> list[dict[str, Any]]:
    """The events of a step trace, also of one whose end is missing."""
    lines = (line.rstrip(",") for line in text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def engine_costs(events: Sequence[dict[str, Any]], batch: int, spent: dict[str, float], steps: int) -> EngineCosts:
    """Of the steps in which the whole batch decoded and nothing else happened."""
    wanted = name_batch(batch, 0)
    spans = {e["args"]["step"]: e for e in events if e["tid"] == DEVICE_LANE and e["name"] == wanted}
    begins = {step: event["ts"] for step, event in spans.items()}
    periods = [begins[step + 1] - begin for step, begin in begins.items() if step + 1 in begins]
    return EngineCosts(
        period_s=_median(periods) / 1e6,
        device_s=_median([event["dur"] for event in spans.values()]) / 1e6,
        host={name: _cost(found) for name, found in _phases(events, spans.keys()).items()},
        process_s={role: seconds / steps for role, seconds in spent.items()},
    )


def _phases(events: Iterable[dict[str, Any]], steps: Iterable[int]) -> dict[str, list[dict[str, Any]]]:
    """The phases of the loop for these steps. Those that name no step stand before the launch of theirs."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    among = frozenset(steps)
    unnamed: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["ph"] != "X" or event["tid"] != HOST_LANE or event["name"] not in HOST_PHASES:
            continue
        step = event["args"].get("step")
        if step is None:
            unnamed[event["name"]] = event
        elif step in among:
            found[event["name"]].append(event)
            if event["name"] == "launch":
                for name, before in unnamed.items():
                    found[name].append(before)
    return {name: found[name] for name in HOST_PHASES if name in found}


def _cost(events: Sequence[dict[str, Any]]) -> Cost:
    return Cost(
        _median([event["dur"] for event in events]) / 1e6, statistics.fmean(event["tdur"] for event in events) / 1e6
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")

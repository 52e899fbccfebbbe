"""`bough bench cpu --profile`: which part of a decode step costs what, with many streams at once.

Two looks at the same load. Through the engine, from its step trace and its processes' CPU times: how long a step takes,
what the scheduler's loop does beside it, what text costs. Through the executor alone, by watching its thread: how a
step divides into the forward pass, sampling and the rest. Sampling is what chats use: temperature and top-p.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import psutil

from bough.bench.cpu_cases import Case
from bough.bench.cpu_plans import CasePlans
from bough.bench.thread_sampler import ThreadSampler
from bough.core.sampling_params import SamplingParams
from bough.core.settings import Settings
from bough.observability.step_trace import DEVICE_LANE, HOST_LANE, name_batch

SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
HOST_PHASES = ("messages", "plan", "launch", "commit")  # waiting is none: the step runs meanwhile
FORWARD_ROOMS = frozenset({"models", "layers", "attention", "kernels", "native"})
EXECUTOR_FILES = {"native_tapes.py": "native", "native_sampling.py": "sampling"}  # they call compiled work


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The middle step of a run, in seconds; the parts beside the device overlap with it."""

    period_s: float  # from the beginning of one step to that of the next
    device_s: float
    host_s: dict[str, float]  # by phase of the scheduler's loop
    process_s: dict[str, float]  # CPU time of each process, per step


def profile(model: str, threads: int, settings: dict[str, Any], case: Case) -> str:
    flat = {**settings, "model": model, "cpu_threads": threads}
    costs = _through_engine(flat, case)
    return as_text(costs, _through_executor(flat, case), len(case.prompts))


def _through_engine(flat: dict[str, Any], case: Case) -> StepCosts:
    from bough.launch.engine import Engine

    asked = {**SAMPLING, "max_new_tokens": case.output_tokens, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "steps.json"
        with Engine(**{**flat, "enable_step_trace": True, "step_trace_path": str(trace)}) as engine:
            engine.generate(input_ids=case.prompts, sampling_params={**asked, "max_new_tokens": 2})
            before = cpu_by_role()
            engine.generate(input_ids=case.prompts, sampling_params=asked)
            after = cpu_by_role()
        events = read_trace(trace.read_text())
    spent = {role: seconds - before.get(role, 0.0) for role, seconds in after.items()}
    return step_costs(events, len(case.prompts), spent, case.output_tokens)


def cpu_by_role() -> dict[str, float]:
    """CPU time so far: of this process, which is the client, and of the engine's."""
    this = psutil.Process()
    spent = {"client": _cpu_of(this)}
    for child in this.children(recursive=True):
        role = next((word for word in child.cmdline() if word.startswith("bough::")), "other")
        spent[role.removeprefix("bough::")] = _cpu_of(child)
    return spent


def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def read_trace(text: str) -> list[dict[str, Any]]:
    """The events of a step trace, also of one whose end is missing."""
    lines = (line.rstrip(",") for line in text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def step_costs(events: Iterable[dict[str, Any]], batch: int, spent: dict[str, float], steps: int) -> StepCosts:
    """Medians over the steps in which the whole batch decoded and nothing else happened."""
    wanted = name_batch(batch, 0)
    spans = {e["args"]["step"]: e for e in events if e["tid"] == DEVICE_LANE and e["name"] == wanted}
    begins = {step: event["ts"] for step, event in spans.items()}
    periods = [begins[step + 1] - begin for step, begin in begins.items() if step + 1 in begins]
    return StepCosts(
        period_s=_median(periods) / 1e6,
        device_s=_median([event["dur"] for event in spans.values()]) / 1e6,
        host_s={name: _median(found) / 1e6 for name, found in _phases(events, spans.keys()).items()},
        process_s={role: seconds / steps for role, seconds in spent.items()},
    )


def _phases(events: Iterable[dict[str, Any]], steps: Iterable[int]) -> dict[str, list[float]]:
    """How long each phase of the loop took. Those that name no step stand before the launch of theirs."""
    found: dict[str, list[float]] = defaultdict(list)
    among = frozenset(steps)
    unnamed: dict[str, float] = {}
    for event in events:
        if event["ph"] != "X" or event["tid"] != HOST_LANE or event["name"] not in HOST_PHASES:
            continue
        step = event["args"].get("step")
        if step is None:
            unnamed[event["name"]] = event["dur"]
        elif step in among:
            found[event["name"]].append(event["dur"])
            if event["name"] == "launch":
                for name, lasted in unnamed.items():
                    found[name].append(lasted)
    return {name: found[name] for name in HOST_PHASES if name in found}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _through_executor(flat: dict[str, Any], case: Case) -> dict[str, float]:
    """Shares of the executor's thread while it decodes."""
    from bough.executor.build import build_executor
    from bough.loader.locate import locate

    executor = build_executor(locate(flat["model"]), Settings.from_flat(flat)).executor
    plans = CasePlans(case, executor.limits(), SamplingParams(**SAMPLING))
    for plan in plans.prompts():
        executor.launch(plan).wait()
    thread = next(t.ident for t in threading.enumerate() if t.name.startswith("executor"))
    assert thread is not None
    with ThreadSampler(thread, classify) as sampler:
        for plan in plans.decodes():
            executor.launch(plan).wait()
    executor.close()
    return sampler.shares()


def classify(files: list[str]) -> str | None:
    """What a stack of the executor's thread is busy with; None: it waits for work."""
    rooms = {room for file in files if (room := _room_of(PurePath(file))) is not None}
    if "sampling" in rooms:  # before the forward pass: it uses kernels too
        return "sampling"
    if rooms & FORWARD_ROOMS:
        return "forward pass"
    return "rows, layout, results" if "executor" in rooms else None


def _room_of(file: PurePath) -> str | None:
    if file.name in EXECUTOR_FILES:
        return EXECUTOR_FILES[file.name]
    folder = file.parent
    return next((inner.name for inner in (folder, *folder.parents) if inner.parent.name == "bough"), None)


def as_text(costs: StepCosts, shares: dict[str, float], batch: int) -> str:
    def line(name: str, seconds: float) -> str:
        return f"  {name:<34} {1e3 * seconds:9.3f} ms {seconds / costs.period_s:8.1%}"

    lines = [f"a decode step of {batch} streams, {SAMPLING}, as a share of the time from step to step"]
    lines += [line("step", costs.period_s), line("on the executor's thread", costs.device_s)]
    lines += [line(f"  {name}", share * costs.device_s) for name, share in shares.items()]
    lines.append("the scheduler's loop, beside the step before")
    lines += [line(name, seconds) for name, seconds in costs.host_s.items()]
    lines.append("CPU time of the processes, over all their threads and cores")
    lines += [line(name, seconds) for name, seconds in costs.process_s.items()]
    sampling = shares.get("sampling", 0.0) * costs.device_s
    text_s = costs.process_s.get("detokenizer", 0.0)
    lines.append(line("sampling and detokenising together", sampling + text_s))
    return "\n".join(lines)

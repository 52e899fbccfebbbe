"""`bough bench cpu --profile`: which part of a decode step costs what, with many streams at once, free and under a JSON
schema.

Two looks at each load. Through the engine, from its step trace and its processes' CPU times: how long a step takes,
what the scheduler's loop does beside it, what text costs. Through the executor alone, by watching its thread: how a
step divides into the forward pass, sampling, masks and the rest. Sampling is what chats use: temperature and top-p. CPU
time stands beside the time on the clock, because on a machine that others use too only it says what a part costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.bench.constrained import RECORD
from bough.bench.cpu_cases import Case
from bough.bench.cpu_executor_profile import SAMPLING, executor_costs
from bough.bench.cpu_step_costs import Cost, EngineCosts, cpu_by_role, engine_costs, read_trace
from bough.core.sampling_params import SamplingParams
from bough.core.settings import Settings
from bough.launch.parts import has_text

CHAT: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
SCHEMA: dict[str, Any] = {"type": "array", "items": RECORD, "minItems": 1}


@dataclass(frozen=True, slots=True)
class Profile:
    """One load, looked at in both ways."""

    title: str
    engine: EngineCosts
    executor: dict[str, Cost]  # by part of a step on the executor's thread


def profile(model: str, threads: int, settings: dict[str, Any], case: Case) -> str:
    # Without jump-forward every token is sampled under a mask, and every step has all streams.
    flat = {**settings, "model": model, "cpu_threads": threads, "disable_jump_forward": True}
    title = f"a decode step of {len(case.prompts)} streams, {CHAT}"
    loads = {title: None, "the same under a JSON schema": SCHEMA}
    if not has_text(Settings.from_flat(flat).model):
        loads = {title: None}
    engine = _through_engine(flat, case, loads)
    return "\n\n".join(
        as_text(Profile(title, engine[title], executor_costs(flat, case, SamplingParams(**CHAT), schema)))
        for title, schema in loads.items()
    )


def _through_engine(
    flat: dict[str, Any], case: Case, loads: Mapping[str, dict[str, Any] | None]
) -> dict[str, EngineCosts]:
    """By title, one after the other in one engine."""
    from bough.launch.engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "steps.json"
        with Engine(**{**flat, "enable_step_trace": True, "step_trace_path": str(trace)}) as engine:
            return {title: _one_load(engine, case, trace, schema) for title, schema in loads.items()}


def _one_load(engine: Any, case: Case, trace: Path, schema: dict[str, Any] | None) -> EngineCosts:
    asked = {**CHAT, "json_schema": schema, "ignore_eos": True}
    engine.generate(input_ids=case.prompts, sampling_params={**asked, "max_new_tokens": 2})  # compiles the grammar
    begun, before = len(trace.read_text()), cpu_by_role()
    engine.generate(input_ids=case.prompts, sampling_params={**asked, "max_new_tokens": case.output_tokens})
    spent = {role: seconds - before.get(role, 0.0) for role, seconds in cpu_by_role().items()}
    return engine_costs(read_trace(trace.read_text()[begun:]), len(case.prompts), spent, case.output_tokens)


def as_text(found: Profile) -> str:
    """Shares are of the time from step to step, and of the CPU time of the executor's thread."""
    engine, parts = found.engine, found.executor
    own_cpu_s = sum(part.cpu_s for part in parts.values())
    own_wall_s = sum(part.wall_s for part in parts.values())

    def line(name: str, wall_s: float | None, cpu_s: float | None) -> str:
        wall, cpu = _figures(wall_s, engine.period_s), _figures(cpu_s, own_cpu_s)
        return f"  {name:<38}{wall:>20}{cpu:>20}".rstrip()

    lines = [found.title, f"  {'':<38}{'on the clock':>20}{'CPU time':>20}"]
    lines += [line("from step to step", engine.period_s, None), line("executor's thread", engine.device_s, own_cpu_s)]
    for name, part in parts.items():
        lines.append(line(f"  {name}", part.wall_s / own_wall_s * engine.device_s, part.cpu_s))
    lines.append("scheduler's loop, beside the executor")
    lines += [line(f"  {name}", cost.wall_s, cost.cpu_s) for name, cost in engine.host.items()]
    lines.append("processes, with all their threads")
    lines += [line(f"  {name}", None, seconds) for name, seconds in engine.process_s.items()]
    together = {name: parts[name].cpu_s for name in (SAMPLING,) if name in parts}
    if "masks" in engine.host:
        together["filling masks"] = engine.host["masks"].cpu_s
    together["detokenising"] = engine.process_s.get("detokenizer", 0.0)
    lines.append(f"  {' + '.join(together):<58}{_figures(sum(together.values()), own_cpu_s):>20}")
    return "\n".join(lines)


def _figures(seconds: float | None, whole_s: float) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f} ms {seconds / whole_s:7.1%}"

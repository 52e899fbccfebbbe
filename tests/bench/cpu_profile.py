"""Which part of a decode step costs what on a CPU, with many streams at once, free and under a JSON schema.

Run as `python -m tests.bench.cpu_profile`, with the engine's flags. It measures each load twice. Through the engine,
from its step trace and its processes' CPU times: how long a step takes, what the scheduler's loop does beside it, what
text costs. Through the executor alone, by sampling its thread: how a step divides into the forward pass, sampling,
masks and the rest. Sampling is what chats use: temperature and top-p. CPU time stands beside wall time, because on a
machine that others use too only CPU time says what a part costs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.cli.bench import run_benchmark
from bough.core.sampling_params import SamplingParams
from bough.core.settings import Settings
from bough.launch.parts import has_text
from bough.loader.locate import locate
from tests.bench.constrained import RECORD
from tests.bench.cpu_cases import VOCABULARY, Case, cases
from tests.bench.cpu_executor_profile import SAMPLING, executor_costs
from tests.bench.cpu_step_costs import Cost, EngineCosts, cpu_by_role, engine_costs, read_trace

CHAT: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
SCHEMA: dict[str, Any] = {"type": "array", "items": RECORD, "minItems": 1}


@dataclass(frozen=True, slots=True)
class Profile:
    """One load, looked at in both ways."""

    title: str
    engine: EngineCosts
    executor: dict[str, Cost]  # by part of a step on the executor's thread


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=1.0, help="shortens the load, for a quick try")
    parser.add_argument("--vocab", type=int, default=VOCABULARY, help="token ids of the prompts are below this")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    chosen = Settings.from_flat(settings)
    files = locate(chosen.model.model_path, chosen.model.revision)
    # Without jump-forward every token is sampled under a mask, and every step has all streams.
    flat = {name: value for name, value in settings.items() if name != "model_path"}
    flat |= {"model": str(files.gguf or files.folder), "disable_jump_forward": True}
    case = next(case for case in cases(args.scale, vocabulary=args.vocab) if case.name == "streams-16")
    loads: dict[str, dict[str, Any] | None] = {f"a decode step of {len(case.prompts)} streams, {CHAT}": None}
    if has_text(chosen.model):
        loads["the same under a JSON schema"] = SCHEMA
    engine = _through_engine(flat, case, loads)
    sampling = SamplingParams(**CHAT)
    reports = (
        as_text(Profile(title, engine[title], executor_costs(flat, case, sampling, schema)))
        for title, schema in loads.items()
    )
    print("\n\n".join(reports))
    return 0


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
    """With its share of the whole, which the clock of a short run may have found to be nothing."""
    share = seconds / whole_s if seconds and whole_s else 0.0
    return "" if seconds is None else f"{1e3 * seconds:.3f} ms {share:7.1%}"


if __name__ == "__main__":
    sys.exit(run_benchmark("cpu_profile", sys.modules[__name__], sys.argv[1:]))

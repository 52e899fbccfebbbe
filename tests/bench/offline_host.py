"""What the host adds to an offline load: an engine whose device is a clock.

A step takes a time for each of its tokens, but no less than that of reading the weights. Printed are the time before
the first launch and after the end of the last step, how long the device waited in between, and the sequence of steps
(`--steps`). All of it is the host's doing, so it is the same kind of figure on a machine without a GPU:

    PYTHONPATH=. python -m tests.bench.offline_host --workload W2
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bough.bench.offline import WORKLOADS, sampling_of, workload
from bough.core.plan import BatchPlan
from bough.core.settings import Settings
from bough.launch import engine
from bough.loader.config import read_config
from bough.loader.locate import ModelFiles
from tests.bench.null_executor import NullExecutor, NullModel, NullStep

CLOCK_VARIABLE = "BOUGH_CLOCK"  # passed to the scheduler's process: where steps are written, and what they take
BUILDER = "tests.bench.offline_host:build"


class Clock(NullExecutor):
    def __init__(self, context_length: int, vocab_size: int, path: str, token_us: float, least_ms: float) -> None:
        super().__init__(context_length, vocab_size)
        self._limits = replace(self._limits, late_plans=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (closed with the process)
        self._token_s, self._least_s = 1e-6 * token_us, 1e-3 * least_ms

    def launch(self, plan: BatchPlan) -> NullStep:
        began, tokens = time.monotonic(), int(plan.query_lens.sum())
        self._step_s = max(self._least_s, self._token_s * tokens)
        step = super().launch(plan)
        prompts, rows = len(plan.tokens), len(plan.rows)
        print(json.dumps([began, time.monotonic(), step.ready_at, prompts, tokens - prompts, rows]), file=self._file)
        return replace(step, result=replace(step.result, device_span=(step.ready_at - self._step_s, step.ready_at)))


def build(files: ModelFiles, settings: Settings) -> NullModel:
    config = read_config(files, {})
    length = settings.model.context_length or config.context_length
    return NullModel(Clock(length, config.vocab_size, *json.loads(os.environ[CLOCK_VARIABLE])), config)


@dataclass(frozen=True, slots=True)
class Step:
    launched_at: float
    queued_at: float
    done_at: float
    prompt_tokens: int
    decodes: int
    rows: int


def run(load: str, token_us: float, least_ms: float, repeat: int) -> list[dict[str, Any]]:
    jobs, found = workload(load), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        os.environ[CLOCK_VARIABLE] = json.dumps([str(path), token_us, least_ms])
        engine.EngineProcesses = functools.partial(engine.EngineProcesses, executor=BUILDER)  # type: ignore
        with engine.Engine(model_shape="llama-3.1-8b", context_length=8192) as clocked:
            clocked.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2, "ignore_eos": True})
            for _ in range(repeat):
                clocked.flush_cache()
                time.sleep(0.5)
                path.write_text("")
                began = time.monotonic()
                prompts = [job.prompt for job in jobs]
                answers = clocked.generate(input_ids=prompts, sampling_params=[sampling_of(job) for job in jobs])
                ended = time.monotonic()
                steps = [Step(*json.loads(line)) for line in path.read_text().splitlines()]
                waits = [after.queued_at - before.done_at for before, after in pairwise(steps)]
                found.append(
                    {
                        "duration_ms": 1e3 * (ended - began),
                        "before_first_launch_ms": 1e3 * (steps[0].launched_at - began),
                        "device_waits_ms": 1e3 * sum(max(0.0, wait) for wait in waits),
                        "after_last_step_ms": 1e3 * (ended - steps[-1].done_at),
                        "cached_tokens": sum(answer["meta_info"]["cached_tokens"] for answer in answers),
                        "steps": steps,
                    }
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="W2")
    parser.add_argument("--token-us", type=float, default=19.8, help="that a token takes (Llama-3.1-8B on an H200)")
    parser.add_argument("--least-ms", type=float, default=4.0, help="that a step takes")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", action="store_true", help="print the steps of the last run")
    args = parser.parse_args()
    found = run(args.workload, args.token_us, args.least_ms, args.repeat)
    for result in found:
        shown = {name: round(value, 1) for name, value in result.items() if name != "steps"}
        print(json.dumps({**shown, "steps": len(result["steps"])}))
    for number, step in enumerate(found[-1]["steps"] if args.steps else ()):
        print(f"{number:4} {step.prompt_tokens:6} prompt tokens {step.decodes:5} decodes {step.rows:5} rows")


if __name__ == "__main__":
    main()

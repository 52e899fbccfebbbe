"""Where the time of a step goes on a GPU: `PYTHONPATH=. python tests/executor/gpu_profile_steps.py qwen3-0.6b`.

Drives the executor by hand. For decode steps and for steps with prompts it prints the wall time, the host's part of it,
and the kernels that take longest; `--host` adds the functions in which the host spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bough.core.plan import BatchPlan, InFlight
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.plain_plans import decode_plan, prompt_plan
from bough.loader.locate import find_files
from tests.bench.one_batch import run_batch

STEPS = 20
DECODES = ((256, 900), (128, 900), (16, 900), (1, 300))  # rows, keys
PROMPTS = (128, 640, 2048, 8192)


def mixed_plan(step: int, decodes: int, tokens: int, row: int, first_page: int) -> BatchPlan:
    """A prompt on a row of its own beside the decodes of the first rows."""
    prompt = prompt_plan(
        row, np.arange(tokens, dtype=np.int32) % 1000, np.arange(first_page, first_page + tokens, dtype=np.int32)
    )
    beside = decode_plan(step, decodes)
    return replace(
        prompt,
        step=step,
        rows=np.concatenate((beside.rows, prompt.rows)),
        query_lens=np.concatenate((beside.query_lens, prompt.query_lens)),
        given=np.concatenate((beside.given, prompt.given)),
        new_page_counts=(np.concatenate((beside.new_page_counts[0], prompt.new_page_counts[0])),),
        sample=np.concatenate((beside.sample, prompt.sample)),
    )


def measure(name: str, executor: CudaExecutor, make: Callable[[int], BatchPlan], host: bool) -> None:
    def run(steps: int) -> InFlight:
        for step in range(steps):
            flight = executor.launch(make(step))
        return flight

    run(3).wait()
    began = time.perf_counter()
    flight = run(STEPS)
    launched = time.perf_counter() - began
    flight.wait()
    wall = time.perf_counter() - began
    print(f"{name}: {1e3 * wall / STEPS:.3f} ms a step, launched in {1e3 * launched / STEPS:.3f} ms")
    with profile(activities=[ProfilerActivity.CUDA]) as kernels:
        run(5).wait()
        torch.cuda.synchronize()
    found = [event for event in kernels.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in found)
    print(f"  kernels {total / 5e3:.3f} ms")
    for event in sorted(found, key=lambda event: -event.self_device_time_total)[:12]:
        each = event.self_device_time_total
        print(f"  {each / 5:9.1f} us {event.count / 5:6.1f} x {each / event.count:8.2f} us  {event.key[:70]}")
    if host:
        watch = cProfile.Profile()
        watch.enable()
        flight = run(STEPS)
        watch.disable()
        flight.wait()
        pstats.Stats(watch).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--host", action="store_true", help="profile the host as well")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--settings", type=json.loads, default={}, help='such as {"quantization": "fp8"}')
    options = parser.parse_args()
    settings = Settings.from_flat({"model_shape": options.shape, "context_length": 8192, **options.settings})
    executor = build_executor(find_files(settings.model), settings).executor
    assert isinstance(executor, CudaExecutor)
    run_batch(executor, 1, 8, 2)
    while executor.idle():
        pass
    for rows, keys in DECODES:
        if options.only in (name := f"{rows} decodes over {keys} keys"):
            run_batch(executor, rows, keys, 2)
            measure(name, executor, lambda step, rows=rows: decode_plan(step, rows), options.host)  # type: ignore[misc]
    run_batch(executor, 64, 600, 2)
    for tokens in PROMPTS:
        if options.only in (name := f"64 decodes and a prompt of {tokens}"):
            measure(
                name,
                executor,
                lambda step, tokens=tokens: mixed_plan(step, 64, tokens, 100 + step % 8, 200_000 + step % 8 * 8192),  # type: ignore[misc]
                options.host,
            )


if __name__ == "__main__":
    main()

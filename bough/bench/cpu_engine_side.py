"""The side of `bough bench cpu` that users have: an `Engine` with its processes, asked through `generate`."""

from __future__ import annotations

import time
from typing import Any

from bough.bench.cpu_cases import Case, Timing
from bough.bench.cpu_child import Stopwatch, read_order, run_side, serve

FIRST_PROMPT = [1, 2, 3, 4]
PROCESSES = "processes and their imports"


def main() -> None:
    order = read_order()
    watch = Stopwatch(order.spawned)
    from bough.launch.engine import Engine  # timed: it is part of a start

    watch.lap("imports")
    with Engine(**{**order.settings, "model": order.model, "cpu_threads": order.threads}) as engine:
        watch.lap(PROCESSES)
        engine.generate(input_ids=FIRST_PROMPT, sampling_params=greedy(1))
        watch.lap("first token")
        watch.split(PROCESSES, "load", engine.get_server_info()["load_time_s"])
        serve(watch, lambda case: run_case(engine, case))


def greedy(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


def run_case(engine: Any, case: Case) -> Timing:
    """The load on an empty cache. Only a single request is streamed: there, the first token is asked for."""
    engine.flush_cache()
    prompts = [case.prefix + prompt for prompt in case.prompts]
    began = time.perf_counter()
    if len(prompts) > 1:
        engine.generate(input_ids=prompts, sampling_params=greedy(case.output_tokens))
        done = time.perf_counter()
        return Timing(done - began, done - began)
    pieces = engine.generate(input_ids=prompts[0], sampling_params=greedy(case.output_tokens), stream=True)
    first_tokens = next(pieces)["meta_info"]["completion_tokens"]
    first = time.perf_counter()
    for _ in pieces:
        pass
    return Timing(first - began, time.perf_counter() - began, first_tokens)


if __name__ == "__main__":
    run_side(main)

"""The side of `bough bench cpu` without scheduler, processes and text: plans made by hand, straight to the executor.

What is between its figures and the engine's is what planning, committing, messages and text cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bough.bench.cpu_cases import Case, Timing
from bough.bench.cpu_child import Stopwatch, read_order, run_side, serve
from bough.bench.cpu_plans import CasePlans
from bough.core.plan import BatchPlan, Executor
from bough.core.settings import Settings


def main() -> None:
    order = read_order()
    watch = Stopwatch(order.spawned)
    from bough.executor.build import build_executor  # timed: torch is most of it
    from bough.loader.locate import locate

    watch.lap("imports")
    settings = Settings.from_flat({**order.settings, "model": order.model, "cpu_threads": order.threads})
    executor = build_executor(locate(order.model), settings).executor
    watch.lap("load")
    run_case(executor, Case("first", "first token", "prompt", [], [[1, 2, 3, 4]], 1))
    watch.lap("first token")
    while executor.idle():  # work that the executor has put off
        pass
    serve(watch, lambda case: run_case(executor, case))
    executor.close()


def run_case(executor: Executor, case: Case) -> Timing:
    plans, clock = CasePlans(case, executor.limits()), time.process_time if case.cpu_time else time.perf_counter
    began = clock()
    _run(executor, plans.prompts())
    first = clock()
    _run(executor, plans.decodes())
    return Timing(first - began, clock() - began)


def _run(executor: Executor, plans: Iterator[BatchPlan]) -> None:
    """One step is in flight while the next is made, as under the scheduler."""
    in_flight = None
    for plan in plans:
        launched = executor.launch(plan)
        if in_flight is not None:
            in_flight.wait()
        in_flight = launched
    if in_flight is not None:
        in_flight.wait()


if __name__ == "__main__":
    run_side(main)

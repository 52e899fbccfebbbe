"""`bough bench cpu` with one more side: the executor alone, without scheduler, processes and text.

Run as `python -m tests.bench.cpu_executor`, with the flags of `bough bench cpu`. The distance between the executor's
figures and the engine's is what planning, committing, messages and text cost.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from bough.cli.bench import run_benchmark
from bough.core.plan import BatchPlan, Executor
from bough.core.settings import Settings
from tests.bench import cpu
from tests.bench.cpu_cases import Case, Timing
from tests.bench.cpu_engine_side import Stopwatch, read_order, serve
from tests.bench.cpu_plans import CasePlans

SERVE = "--serve"  # the command line of the measured process
EXECUTOR = cpu.Side(
    "executor", "Bough, executor alone", (sys.executable, "-P", "-m", "tests.bench.cpu_executor", SERVE)
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    cpu.add_flags(parser)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count CPU time of a single thread, for machines that others use; leaves out the engine, whose processes "
        "share it",
    )


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    sides = [EXECUTOR] if args.cpu_time else [cpu.ENGINE, EXECUTOR]
    return cpu.measure(args, settings, sides, cpu_time=args.cpu_time)


# ---- the measured process


def serve_loads() -> None:
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
    while executor.idle():  # deferred work
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
    if sys.argv[1:] == [SERVE]:
        serve_loads()
    else:
        sys.exit(run_benchmark("cpu_executor", sys.modules[__name__], sys.argv[1:]))

"""Any number of fuzzed requests over HTTP, and a table of what came of them: `python -m tests.fuzz.many --cases 10000`.

Strategies and checks are those of the tests. Cases come in rounds of at most 30 for each route, each round with a seed
of its own, so that the same command sends the same requests. It ends with 1 if a check has failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from bough.server import live_tree
from tests.fuzz import test_fuzz_gateway as through_gateway
from tests.server import test_server_fuzz as at_server

ROUND = 30  # cases of a route
HEADER = "| run | routes | cases | 2xx | 4xx | 501, 503 | failed | seconds |"


class Tally:
    """What has come of one run's cases."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []

    def attempt(self, name: str, act: Callable[[], int]) -> None:
        try:
            status = act()
        except Exception as error:  # noqa: BLE001  # a failed check, a broken connection, a timeout: all are what is looked for
            self.statuses["failed"] += 1
            self.problems.append(f"{name}: {error!r}"[:2000])
        else:
            self.statuses["501, 503" if status >= 500 else f"{status // 100}xx"] += 1

    @property
    def cases(self) -> int:
        return self.statuses.total()


def fuzz(
    targets: Iterable[tuple[str, Mapping[str, SearchStrategy[Any]], Callable[..., int]]], cases: int, begin: int
) -> Tally:
    """Tries all targets (name, what to draw, what to do with it) in rounds until there have been so many cases."""
    tally, targets, number = Tally(), list(targets), begin
    size = min(ROUND, -(-cases // len(targets))) if len(targets) > 1 else cases
    while tally.cases < cases:
        for target in targets:
            try_often(tally, *target, size, number)
        number += 1
    return tally


def try_often(
    tally: Tally, name: str, strategies: Mapping[str, SearchStrategy[Any]], act: Callable[..., int], size: int, by: int
) -> None:
    @seed(by)
    @settings(max_examples=size, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(**strategies)
    def attempt(**drawn: Any) -> None:
        tally.attempt(name, lambda: act(**drawn))

    attempt()


def at_the_server(cases: int, begin: int) -> tuple[int, Tally]:
    live_tree.PERIOD_S = 0.001  # the stream of the tree lasts ten of these

    def call(case: Any) -> int:
        return int(case.call_and_validate(checks=at_server.CHECKS, timeout=60).status_code)

    routes = [result.ok() for result in at_server.schema.get_all_operations()]
    return len(routes), fuzz([(r.label, {"case": r.as_strategy()}, call) for r in routes], cases, begin)


def through_a_gateway(cases: int, begin: int) -> tuple[int, Tally]:
    routes = [result.ok() for result in through_gateway.schema.get_all_operations()]
    with through_gateway.running_gateway() as url:

        def call(case: Any) -> int:
            return through_gateway.no_server_error(case, url)

        return len(routes), fuzz([(r.label, {"case": r.as_strategy()}, call) for r in routes], cases, begin)


def at_the_gateways_own(cases: int, begin: int) -> tuple[int, Tally]:
    with through_gateway.running_gateway() as url:

        def call(**drawn: Any) -> int:
            return through_gateway.own_routes(url, **drawn)

        return len(through_gateway.OWN), fuzz([("the gateway", through_gateway.ROUTES, call)], cases, begin)


RUNS = {"server": at_the_server, "gateway": through_a_gateway, "own": at_the_gateways_own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of each run, at least (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default: 0)")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="these runs alone")
    chosen = parser.parse_args()
    print(f"{HEADER}\n|{'---|' * (HEADER.count('|') - 1)}", flush=True)
    problems: list[str] = []
    for name in chosen.only:
        began_s = time.monotonic()
        routes, tally = RUNS[name](chosen.cases, chosen.seed)
        counts = [tally.statuses[kind] for kind in ("2xx", "4xx", "501, 503", "failed")]
        figures = [routes, tally.cases, *counts, round(time.monotonic() - began_s)]
        print(f"| {name} | {' | '.join(map(str, figures))} |", flush=True)
        problems += tally.problems
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

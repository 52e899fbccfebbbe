"""What the page costs the engine: the same load with and without a page that watches, in turns, in one run.

`bough bench page` runs it in a checkout, over a server of its own. A page is what a browser keeps open: the stream of
the live tree, and timelines and metrics as often as the page asks for them. Rounds alternate, so what else the machine
does falls on both alike; the ratio is that of the medians, and the spread says what it is worth. Beside it stands the
CPU time of each process, which holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx

from bough.core.setting_checks import require_counts
from bough.observability.processes import cpu_seconds
from tests.system.serving import running

TIMELINE_EVERY_S, METRICS_EVERY_S = 1.0, 2.0  # as the page does


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    parser.add_argument("--requests", type=int, default=24, help="of a round")
    parser.add_argument("--clients", type=int, default=4, help="that send them")
    parser.add_argument("--output-len", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--pages", type=int, default=1, help="that watch, where one does")


def main(args: argparse.Namespace) -> int:
    require_counts(args, ("rounds", "requests", "clients", "output_len", "pages"))
    with running() as server, httpx.Client(base_url=server.url, timeout=120) as http:
        load = Load(http, args)
        load.run()  # what is done once is done before the first round
        rates: dict[bool, list[float]] = {False: [], True: []}
        cpu: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        for number in range(2 * args.rounds):
            watched = number % 2 == 1
            before = Counter(cpu_seconds(server.process.pid))
            with pages(server.url, args.pages if watched else 0):
                rates[watched].append(load.run())
            cpu[watched] += Counter(cpu_seconds(server.process.pid)) - before
            kind = "with" if watched else "without"
            print(f"round {number // 2 + 1}, {kind} a page: {rates[watched][-1]:.1f} tokens/s")
    without, beside = statistics.median(rates[False]), statistics.median(rates[True])
    spread = (max(rates[False]) - min(rates[False])) / without
    print(f"without a page {without:.1f} tokens/s, with {args.pages}: {beside:.1f}; ratio {beside / without:.4f}")
    print(f"the rounds without a page differ by {spread:.1%} among themselves")
    for component, seconds in cpu[False].items():
        print(f"CPU of the {component}: {seconds:.2f} s without a page, {cpu[True][component]:.2f} s with")
    return 0


class Load:
    """Every answer has the same length, and no prompt has been seen before."""

    def __init__(self, http: httpx.Client, args: argparse.Namespace) -> None:
        self._http, self._args = http, args
        self._asked = 0

    def run(self) -> float:
        """Tokens generated per second."""
        first, self._asked = self._asked, self._asked + self._args.requests
        began = time.monotonic()
        with ThreadPoolExecutor(self._args.clients) as pool:
            tokens = sum(pool.map(self._ask, range(first, self._asked)))
        return tokens / (time.monotonic() - began)

    def _ask(self, number: int) -> int:
        sampling = {"max_new_tokens": self._args.output_len, "ignore_eos": True, "temperature": 0}
        body = {"text": f"Number {number}: trees that grow in wet soil are", "sampling_params": sampling}
        answer = self._http.post("/generate", json=body).raise_for_status().json()
        return int(answer["meta_info"]["completion_tokens"])


@contextlib.contextmanager
def pages(url: str, count: int) -> Iterator[None]:
    """What so many open pages read, until the block ends."""
    closed = threading.Event()
    reads = (tree, timelines, metrics) * count
    readers = [threading.Thread(target=read, args=(url, closed)) for read in reads]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        closed.set()
        for reader in readers:
            reader.join()


def tree(url: str, closed: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=30) as http:
        while not closed.is_set():
            with http.stream("GET", "/ui/tree") as stream:
                for _ in stream.iter_raw():
                    if closed.is_set():
                        break


def timelines(url: str, closed: threading.Event) -> None:
    since = 0.0
    with httpx.Client(base_url=url, timeout=30) as http:
        while not closed.wait(TIMELINE_EVERY_S):
            since = http.get("/ui/timeline", params={"since": since}).json()["replicas"][0]["now"]


def metrics(url: str, closed: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=30) as http:
        while not closed.wait(METRICS_EVERY_S):
            http.get("/metrics")

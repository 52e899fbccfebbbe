"""`python -m tests.system.chaos [--minutes 10] [--seed 0] [--out FOLDER] [--only WORD …]`

Five engines of two models behind a gateway under mixed load, and a fault every few seconds. Ends with a table,
`chaos.json` and `chaos.png`, and exit code 1 if a request was lost, an output differed, or something was not given
back."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.system.chaos.faults import FAULTS
from tests.system.chaos.fleet import HEADERS, Fleet
from tests.system.chaos.load import Load, cases, image_cases
from tests.system.chaos.report import Record, write_report

PAUSES_S = (2.0, 5.0)
SETTLED_S = 90.0


async def disturb(fleet: Fleet, record: Record, until: float, draw: random.Random, names: list[str]) -> None:
    """One fault after the other, in shuffled rounds, as long as each model has two engines."""
    waiting: list[str] = []
    while time.monotonic() < until:
        await asyncio.sleep(draw.uniform(*PAUSES_S))
        await fleet.wait_for(2)
        waiting = waiting or draw.sample(names, len(names))
        name = waiting.pop()
        begin = time.monotonic()
        told = await FAULTS[name](fleet, draw)
        record.fault(name, begin, told)
        print(f"{record.now():6.1f} s  {name}: {told or 'not possible here'}", flush=True)


async def sample(fleet: Fleet, load: Load, record: Record) -> None:
    while True:
        record.sample(fleet, load)
        await asyncio.sleep(1.0)


async def pages_in_use(fleet: Fleet) -> int:
    """After a flush, in all engines; what is left is lost."""
    used = 0
    for worker in await fleet.workers():
        async with fleet.session.post(f"{worker['url']}/flush_cache?timeout=30", headers=HEADERS) as response:
            await response.read()
        async with fleet.session.get(f"{worker['url']}/v1/loads", headers=HEADERS) as response:
            used += sum(entry["num_used_tokens"] for entry in (await response.json())["loads"])
    return used


async def settle(fleet: Fleet, load: Load) -> None:
    """Every kind of request at every engine, so that what is loaded on first use is loaded."""
    for _ in range(3):
        await load.once()


async def chaos(minutes: float, seed: int, folder: Path, names: list[str]) -> tuple[Record, dict[str, Any]]:
    record = Record()
    async with Fleet(folder) as fleet:
        load = Load(fleet.url, fleet.was_killed_since, cases=cases() + image_cases())
        await load.learn()
        await settle(fleet, load)
        unsettled = list(load.notes)
        load.outcomes.clear()
        load.sent = 0
        before = await pages_in_use(fleet)
        record.baseline(fleet)
        print(f"{record.now():6.1f} s  the fleet is ready; {len(load.expected)} right answers are known", flush=True)
        sampling = asyncio.create_task(sample(fleet, load, record))
        clients = asyncio.create_task(load.run())
        await disturb(fleet, record, time.monotonic() + minutes * 60, random.Random(seed), names)
        load.stop()
        await clients
        await fleet.wait_for(3)
        during, sent = Counter(load.outcomes), load.sent
        # Engines that have just passed their checks may still be on probation: what counts is that all is well soon.
        deadline = time.monotonic() + SETTLED_S
        after: Counter[str] = Counter()
        while time.monotonic() < deadline:
            after = await load.once()
            if not after["honest error"]:
                break
        await settle(fleet, load)
        sampling.cancel()
        left = await pages_in_use(fleet)
        facts = record.facts(fleet, load, during, sent, after, {"before": before, "after": left}, unsettled)
        facts["log_tail"] = fleet.log()[-4000:]
    return record, facts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    parser.add_argument("--only", nargs="+", metavar="WORD", help="faults whose names contain one of these words")
    options = parser.parse_args()
    names = [name for name in FAULTS if not options.only or any(word in name for word in options.only)]
    if not names:
        parser.error(f"no such fault; there are: {', '.join(FAULTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # the fleet is ended then, too
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        record, facts = asyncio.run(chaos(options.minutes, options.seed, Path(folder), names))
    write_report(options.out, record, facts)
    return 1 if facts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

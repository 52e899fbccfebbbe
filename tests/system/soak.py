"""`python -m tests.system.soak [--minutes 60] [--clients 3] [--out FOLDER]`

One engine with the default model behind a gateway of two processes, under light mixed load for a long time. Every ten
seconds the RSS, descriptors and threads of each process and the accounts of the KV cache are written down. Every five
minutes the clients pause: then no page may be in use. Ends with `soak.csv`, `soak.json` and `soak.svg`, and exit code
1 if a request was lost, an output differed, a page stayed in use, or something has grown since its second fifth."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.system.chaos.load import (
    DIFFERS,
    HONEST,
    LOST,
    OUTCOMES,
    PATIENCE_S,
    RIGHT,
    Case,
    Honest,
    Load,
    Lost,
    chat,
    native,
)
from tests.system.gateways import GatewayProcess, running_gateway

KEY = "soak-of-one-engine"
HEADERS = {"Authorization": f"Bearer {KEY}"}
# Small enough that prefixes are evicted within minutes: what a full cache does is what a long run has to show.
TOKENS, TREE_CHARACTERS = 12000, 1 << 16
ENGINE = ("--max-total-tokens", str(TOKENS), "--cpu-threads", "1", "--log-level", "warning")
GATEWAY = ("--launch", "1", "--processes", "2", "--worker-api-key", KEY, "--log-level", "warning")
SAMPLE_S, ROUND_S, QUIET_S = 10.0, 300.0, 20.0
PAUSES_S = (0.2, 1.5)
MIB = 1 << 20
SPARE_SHARE, SPARE_MIB, SPARE_DESCRIPTORS = 0.03, 8.0, 4
PAGES = ("num_used_tokens", "cached_prefix_tokens", "num_evicted_tokens", "num_running_reqs", "num_waiting_reqs")


@dataclass
class SoakLoad(Load):
    """Half of the requests are new: prompts, schemas, patterns and stop strings that nobody has sent before, so that
    every cache between the client and the device goes round. Each is sent whole and as a stream; both must agree."""

    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    fresh: itertools.count[int] = field(default_factory=itertools.count)

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(number)
        while not self._over.is_set():
            if self.quiet.is_set():
                await asyncio.sleep(0.5)
                continue
            if draw.random() < 0.5:
                await self._request(session, draw.randrange(len(self.cases)))
            else:
                await self._new(session, draw)
            await asyncio.sleep(draw.uniform(*PAUSES_S))

    async def _new(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        case = new_case(next(self.fresh), draw)
        self.sent += 1
        self.in_flight += 1
        try:
            async with asyncio.timeout(2 * PATIENCE_S):
                whole = await self._ask(session, case)
                streamed = await self._ask(session, Case(case.kind, case.path, {**case.body, "stream": True}))
            outcome, note = (RIGHT, "") if whole == streamed else (DIFFERS, f"{whole!r}, as a stream {streamed!r}")
        except Honest as error:
            outcome, note = HONEST, ""
            self.errors[str(error)[:160]] += 1
        except (aiohttp.ClientError, OSError, Lost, TimeoutError, ValueError, KeyError) as error:
            outcome, note = LOST, f"{type(error).__name__}: {error}"
        finally:
            self.in_flight -= 1
        self.outcomes[case.kind, outcome] += 1
        if note:
            self.notes.append(f"{outcome}: {json.dumps(case.body)[:500]}: {note}")


def new_case(number: int, draw: random.Random) -> Case:
    words = " ".join(f"{draw.choice(('tin', 'oak', 'sea', 'hen'))}{draw.randrange(1000)}" for _ in range(20))
    text = f"Story {number}: {words}"
    kind = draw.randrange(5)
    if kind == 0:
        return Case("new chat", "/v1/chat/completions", chat(text))
    if kind == 1:
        return Case("new long prompt", "/generate", native(f"{text} " * draw.randrange(2, 8), 8))
    if kind == 2:
        properties = {f"field_{number}": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": ["age"], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": f"form_{number}", "schema": schema}}
        return Case("new schema", "/v1/chat/completions", {**chat(text), "response_format": form, "max_tokens": 32})
    if kind == 3:
        body = native(text)
        body["sampling_params"] = {"max_new_tokens": 16, "temperature": 0, "regex": f"[a-z]{{2,{number % 50 + 3}}}"}
        return Case("new regex", "/generate", body)
    sampled = {"temperature": 0.8, "seed": number, "stop": [f"stop {number}"], "frequency_penalty": 0.3}
    return Case("new sampled", "/v1/chat/completions", {**chat(text), **sampled})


class Watch:
    """Times in seconds since its making."""

    def __init__(self, gateway: GatewayProcess, load: SoakLoad) -> None:
        self._gateway = gateway
        self._load = load
        self._begin = time.monotonic()
        self._worker = gateway.workers()[0]["url"]
        self._names: dict[int, str] = {}
        self.samples: list[dict[str, Any]] = []
        self.missed: list[str] = []

    async def follow(self, session: aiohttp.ClientSession) -> None:
        while True:
            try:
                self.samples.append(await self.sample(session))
            except (aiohttp.ClientError, TimeoutError, KeyError, psutil.Error) as error:
                self.missed.append(f"{time.monotonic() - self._begin:.0f} s: {type(error).__name__}: {error}")
                print(self.missed[-1], flush=True)
            await asyncio.sleep(SAMPLE_S)

    async def sample(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        quiet = self._load.quiet.is_set() and not self._load.in_flight
        entry: dict[str, Any] = {"t": round(time.monotonic() - self._begin, 1), "quiet": int(quiet)}
        root = psutil.Process(self._gateway.process.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = self._name(process, root)
                entry[f"{name} RSS MiB"] = round(process.memory_info().rss / MIB, 1)
                entry[f"{name} descriptors"] = process.num_fds()
                entry[f"{name} threads"] = process.num_threads()
        async with session.get(f"{self._worker}/get_server_info", headers=HEADERS) as response:
            info = await response.json()
        if not info.get("internal_states"):  # the scheduler was too busy to answer in time
            raise KeyError(f"{response.status} {info.get('internal_states')}")
        entry |= {name: info["internal_states"][0][name] for name in PAGES}
        entry["sent"] = self._load.sent
        entry |= {outcome: sum(c for (_, o), c in self._load.outcomes.items() if o == outcome) for outcome in OUTCOMES}
        return entry

    def _name(self, process: psutil.Process, root: psutil.Process) -> str:
        if process.pid not in self._names:
            words = " ".join(process.cmdline())
            marks = {"bough::scheduler": "scheduler", "bough::detokenizer": "detokenizer", " serve ": "server"}
            marks |= {"bough.gateway.service": "gateway 1", "compiler": "compiler"}
            kind = next((name for mark, name in marks.items() if mark in words), "other")
            kind = "gateway 0" if process == root else kind
            taken = [name for name in self._names.values() if name.startswith(kind)]
            self._names[process.pid] = f"{kind} {process.pid}" if taken else kind
        return self._names[process.pid]


def medians(samples: list[dict[str, Any]], begin: float, end: float) -> dict[str, float]:
    """Of every figure of a process, between two shares of the run; a process that was there for a while counts too."""
    part = samples[int(len(samples) * begin) : int(len(samples) * end)]
    names = [name for name in dict.fromkeys(name for sample in part for name in sample) if is_of_process(name)]
    return {name: statistics.median(sample[name] for sample in part if name in sample) for name in names}


def is_of_process(name: str) -> bool:
    return name.endswith((" MiB", " descriptors", " threads"))


def judge(load: SoakLoad, samples: list[dict[str, Any]], after: dict[str, Any]) -> dict[str, Any]:
    early, late = medians(samples, 0.2, 0.35), medians(samples, 0.85, 1.0)
    failures = list(load.notes)
    for name, value in late.items():
        before = early.get(name, value)
        spare = before * SPARE_SHARE + SPARE_MIB if name.endswith("MiB") else SPARE_DESCRIPTORS
        if value > before + spare:
            failures.append(f"{name}: {before:g} early, {value:g} at the end")
    quiet = [sample for sample in samples if sample["quiet"]]
    failures += [f"{s['num_used_tokens']} tokens in use in the pause at {s['t']} s" for s in quiet if s[PAGES[0]]]
    if after["num_used_tokens"] or after["cached_prefix_tokens"]:
        failures.append(f"after a flush {after['num_used_tokens']} in use, {after['cached_prefix_tokens']} cached")
    kinds = dict.fromkeys(kind for kind, _ in load.outcomes)
    return {
        "failures": failures,
        "seconds": samples[-1]["t"],
        "sent": load.sent,
        "by_kind": {kind: {o: load.outcomes[kind, o] for o in OUTCOMES if load.outcomes[kind, o]} for kind in kinds},
        "errors": dict(load.errors),
        "pauses_with_no_page_in_use": sum(1 for sample in quiet if not sample["num_used_tokens"]),
        "evicted_tokens": samples[-1]["num_evicted_tokens"],
        "early_and_late": {name: [early.get(name), value] for name, value in late.items()},
    }


def write(folder: Path, facts: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    with (folder / "soak.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(samples)
    (folder / "soak.json").write_text(json.dumps(facts, indent=1) + "\n")
    plot(folder / "soak.svg", samples)


def plot(path: Path, samples: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "soak"  # the same samples give the same file
    import matplotlib.pyplot as plt

    figure, (memory, descriptors, pages, answers) = plt.subplots(4, 1, sharex=True, figsize=(9, 10))
    names = list(dict.fromkeys(name for sample in samples for name in sample))

    def draw(axes: Any, name: str, label: str) -> None:
        known = [sample for sample in samples if name in sample]
        if len(known) > len(samples) / 20:  # a process that lived for a moment is in the table alone
            axes.plot([sample["t"] / 60 for sample in known], [sample[name] for sample in known], label=label)

    for name in names:
        if name.endswith(" RSS MiB"):
            draw(memory, name, name.removesuffix(" RSS MiB"))
        if name.endswith(" descriptors"):
            draw(descriptors, name, name.removesuffix(" descriptors"))
    draw(pages, "num_used_tokens", "in use by requests")
    draw(pages, "cached_prefix_tokens", "cached prefixes")
    for outcome in OUTCOMES:
        draw(answers, outcome, outcome)
    titles = (
        (memory, "RSS, MiB"),
        (descriptors, "descriptors"),
        (pages, "tokens of the KV cache"),
        (answers, "requests"),
    )
    for axes, title in titles:
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    answers.set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


async def soak(gateway: GatewayProcess, minutes: float, clients: int, folder: Path) -> dict[str, Any]:
    load = SoakLoad(gateway.url, lambda begin: False, clients=clients)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        body = {"policy": "cost", "options": {"max_tree_size": TREE_CHARACTERS}}
        async with session.put(f"{gateway.url}/policies", json=body) as response:
            assert response.status == 200, await response.text()
        watch, until = Watch(gateway, load), time.monotonic() + minutes * 60
        following = asyncio.create_task(watch.follow(session))
        await load.learn()
        running = asyncio.create_task(load.run())
        while (left := until - time.monotonic()) > 0 and not running.done() and not following.done():
            await asyncio.wait([running, following], timeout=min(left, ROUND_S - QUIET_S))
            load.quiet.set()
            await asyncio.sleep(QUIET_S)
            load.quiet.clear()
            if watch.samples:  # what is known so far, should the run be broken off
                write(folder, {"so_far": watch.samples[-1]}, watch.samples)
                print(json.dumps(watch.samples[-1]), flush=True)
        load.stop()
        await running
        assert not following.done(), following.exception()
        following.cancel()
        worker = gateway.workers()[0]["url"]
        async with session.post(f"{worker}/flush_cache?timeout=30", headers=HEADERS) as response:
            assert response.status == 200, await response.text()
        after = await watch.sample(session)
        facts = judge(load, watch.samples, after)
        facts["missed_samples"] = watch.missed
        facts["log_tail"] = gateway.log()[-4000:]
        write(folder, facts, watch.samples)
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    options = parser.parse_args()
    with running_gateway(*GATEWAY, "--", *ENGINE) as gateway:
        gateway.wait_for(1)
        facts = asyncio.run(soak(gateway, options.minutes, options.clients, options.out))
    print(json.dumps({**facts, "log_tail": ""}, indent=1))
    return 1 if facts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

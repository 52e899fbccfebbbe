"""`bough bench online`: two online loads that compare servers, over OpenAI's streamed completions.

W5: 1,024 requests, Poisson arrivals at --rate, prompts of 256-1024 random tokens, 128 outputs. W6: 128 users x 5 turns,
closed loop, one 512-token system prompt, 64 new tokens a turn, 128 outputs.

Prints one JSON line: output tokens per second, and median and p99 milliseconds to the first token, between chunks, and
of the whole request. A seed fixes the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from bough.bench.backends import HttpClient, HttpFailure, ServerError, reaching
from bough.bench.driver import OnProgress, run_parts
from bough.core.setting_checks import require_above_zero, require_counts
from bough.gateway.upstream_response import EventReader

REQUESTS = 1024  # W5
USERS, TURNS, SYSTEM_TOKENS, TURN_TOKENS = 128, 5, 512, 64  # W6
OUTPUT_TOKENS = 128
LARGEST_TOKEN = 10_000


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="of a running server, such as http://127.0.0.1:30000")
    parser.add_argument("--model", required=True, help="the name under which it serves its model")
    parser.add_argument("--work", choices=["W5", "W6"], default="W5", help="arrivals at a rate, or users who wait")
    parser.add_argument("--rate", type=float, default=40, help="requests per second (W5)")
    parser.add_argument("--procs", type=int, default=4, help="client processes")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="another seed, other prompts: a repeated one would be answered from the prefix cache",
    )


def main(args: argparse.Namespace) -> int:
    require_counts(args, ("procs",))
    require_above_zero(args, ("rate",))
    asyncio.run(_reach(args.url))

    def part(number: int, on_progress: OnProgress) -> list[Timed | str]:
        return uvloop.run(_play(args, number))

    began = time.perf_counter()
    rows = [row for rows in run_parts(args.procs, part, lambda: lambda answered: None) for row in rows]
    line = summary(args, rows, time.perf_counter() - began)
    print(json.dumps(line))
    if rows and line["failed"] == len(rows):
        raise ServerError(f"Every request failed, the first with: {line['first_failure']}")
    return 0


async def _reach(url: str) -> None:
    with closing(HttpClient(url)) as client, reaching(url):
        await client.get("/v1/models")


# ---- the loads


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of W5, in seconds from the start."""

    at_s: float
    prompt: list[int]


def w5_arrivals(seed: int, rate: float, part: int, parts: int) -> list[Arrival]:
    """One client process's share of the arrivals."""
    draw = random.Random(1000 * seed + part)
    arrivals, at_s = [], 0.0
    for _ in range(REQUESTS // parts):
        at_s += draw.expovariate(rate / parts)
        arrivals.append(Arrival(at_s, tokens_of(draw, draw.randint(256, 1024))))
    return arrivals


def w6_system_prompt(seed: int) -> list[int]:
    return tokens_of(random.Random(7 * seed), SYSTEM_TOKENS)


def w6_draw(seed: int, user: int) -> random.Random:
    return random.Random(5000 * seed + user)


def tokens_of(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(0, LARGEST_TOKEN) for _ in range(count)]


async def _play(args: argparse.Namespace, part: int) -> list[Timed | str]:
    rows: list[Timed | str] = []
    with closing(HttpClient(args.url)) as client:
        await (_play_w5 if args.work == "W5" else _play_w6)(client, args, part, rows)
    return rows


async def _play_w5(client: HttpClient, args: argparse.Namespace, part: int, rows: list[Timed | str]) -> None:
    arrivals = w5_arrivals(args.seed, args.rate, part, args.procs)
    began = time.perf_counter()

    async def one(arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
        rows.append(await timed_completion(client, args.model, arrival.prompt))

    await asyncio.gather(*map(one, arrivals))


async def _play_w6(client: HttpClient, args: argparse.Namespace, part: int, rows: list[Timed | str]) -> None:
    system = w6_system_prompt(args.seed)

    async def user(number: int) -> None:
        draw, history = w6_draw(args.seed, number), list(system)
        for _ in range(TURNS):
            history += tokens_of(draw, TURN_TOKENS)
            row = await timed_completion(client, args.model, history)
            rows.append(row)
            if isinstance(row, str):
                return
            history += row.ids or tokens_of(draw, OUTPUT_TOKENS)

    await asyncio.gather(*(user(number) for number in range(part, USERS, args.procs)))


# ---- one request


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Timed:
    """A streamed response, in seconds from its request."""

    began: float
    first_s: float | None = None
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def add(self, event: bytes, now: float) -> None:
        choices = _CHUNKS.decode(event).choices
        if choices:
            self.ids += choices[0].token_ids or ()
        since = now - self.began
        if self.first_s is None:
            self.first_s = since
        else:
            self.gaps_s.append(since - self.last_s)
        self.last_s = since


async def timed_completion(client: HttpClient, model: str, prompt: list[int]) -> Timed | str:
    """One streamed completion, or why it failed."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.6,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    timed, events = Timed(time.perf_counter()), EventReader()

    def read(data: bytes) -> None:
        now = time.perf_counter()
        for event in events.feed(data):
            timed.add(event, now)

    try:
        response = await client.post("/v1/completions", body, read)
    except (HttpFailure, msgspec.DecodeError) as error:
        return repr(error)
    if response.status != 200:
        return f"{response.status}: {response.text[:200]}"
    return timed if timed.first_s is not None else "an empty stream"


# ---- figures


def summary(args: argparse.Namespace, rows: Sequence[Timed | str], seconds: float) -> dict[str, Any]:
    good = [row for row in rows if isinstance(row, Timed)]
    return {
        "work": args.work,
        "rate": args.rate if args.work == "W5" else None,
        "requests": len(rows),
        "failed": len(rows) - len(good),
        "first_failure": next((row for row in rows if isinstance(row, str)), None),
        "seconds": round(seconds, 2),
        "out_tok_s": round(OUTPUT_TOKENS * len(good) / seconds, 1),
        "ttft_ms": _median_and_p99([row.first_s for row in good if row.first_s is not None]),
        "itl_ms": _median_and_p99([gap for row in good for gap in row.gaps_s]),
        "e2e_ms": _median_and_p99([row.last_s for row in good]),
    }


def _median_and_p99(seconds: Sequence[float]) -> list[float | None]:
    ordered = sorted(seconds)
    if not ordered:
        return [None, None]
    return [round(1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2) for q in (0.5, 0.99)]

"""Sends a load and records what becomes of each request, in several processes where one cannot keep up with a fast
server. All of a run use one start on the monotonic clock, so their records join.

Processes are forked, which hands over what cannot be pickled. A fork needs a process without threads, so progress bars
are made after it.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import uvloop

from bough.bench import backends
from bough.bench.backends import Arrival, Conversation, Prompt, Record, RequestTemplate, Turn
from bough.bench.http_client import HttpClient, HttpFailure
from bough.core.errors import EngineDeadError
from bough.gateway.upstream_response import EventReader

T = TypeVar("T")
OnProgress = Callable[[int], object]  # so many requests have been answered
_task: list[Any] = []  # of a forked process: the work, and where its progress goes
LEAD_S = 0.5  # from starting client processes to their first request


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    headers: dict[str, str]
    template: RequestTemplate


def poisson_arrivals(conversations: Sequence[Conversation], rate: float, seed: int) -> list[Arrival]:
    """Exponential gaps between arrivals; at an infinite rate all come at once."""
    draw = random.Random(seed)
    gaps = (0.0 if rate == float("inf") else draw.expovariate(rate) for _ in conversations[1:])
    times = itertools.accumulate(gaps, initial=0.0)
    return [Arrival(at_s, conversation) for at_s, conversation in zip(times, conversations, strict=False)]


def drive(
    target: Target, arrivals: Sequence[Arrival], at_once: int | None, start: float, on_progress: OnProgress
) -> list[Record]:
    """Plays the arrivals, at most `at_once` conversations at a time; `start` is on the monotonic clock."""
    slots: contextlib.AbstractAsyncContextManager[object]
    slots = contextlib.nullcontext() if at_once is None else asyncio.Semaphore(at_once)
    records: list[Record] = []

    async def play(client: HttpClient, arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, start + arrival.at_s - time.monotonic()))
        async with slots:
            await _converse(client, target.template, arrival.conversation, start, records, on_progress)

    async def play_all() -> None:
        with contextlib.closing(HttpClient(target.url, target.headers)) as client:
            await asyncio.gather(*(play(client, arrival) for arrival in arrivals))

    uvloop.run(play_all())
    return records


async def _converse(
    client: HttpClient,
    template: RequestTemplate,
    conversation: Conversation,
    start: float,
    records: list[Record],
    on_progress: OnProgress,
) -> None:
    history = backends.first_history(template.api, conversation[0].prompt)
    for left, turn in zip(range(len(conversation))[::-1], conversation, strict=True):
        record = await ask(client, template, history, turn, start)
        records.append(record)
        if not record.ok:  # the turns after it have nothing to stand on
            on_progress(1 + left)
            return
        on_progress(1)
        if left:
            history = backends.next_history(history, record.text, conversation[-left].prompt)


async def ask(client: HttpClient, template: RequestTemplate, history: Prompt, turn: Turn, start: float) -> Record:
    raw = msgspec.json.encode(template.body(history, turn.output_tokens))
    began = time.monotonic()
    record = Record(began - start, turn.input_tokens)
    read_event, events = backends.READERS[template.api], EventReader()

    def read(data: bytes) -> None:
        now_s = time.monotonic() - began
        for event in events.feed(data):
            read_event(record, event, now_s)

    try:
        response = await client.post(backends.PATHS[template.api], raw, read if template.stream else None)
        if response.status != 200:
            raise HttpFailure(f"{response.status}: {response.text[:200]}")
        if not template.stream:
            read_event(record, bytes(response.body), time.monotonic() - began)
        if not record.output_tokens:
            raise HttpFailure("an answer without tokens")
    except (HttpFailure, msgspec.DecodeError, AttributeError, TypeError) as error:  # the last two: not such JSON
        record.error = str(error)
    return record


def run_parts(count: int, work: Callable[[int, OnProgress], T], make_on_progress: Callable[[], OnProgress]) -> list[T]:
    """The results of `work(part, on_progress)`. `make_on_progress` is called once all have started."""
    if count == 1:
        return [work(0, make_on_progress())]
    context = multiprocessing.get_context("fork")
    answered = context.SimpleQueue()
    with ProcessPoolExecutor(count, context, _task.extend, ([work, answered.put],)) as pool:
        parts = [pool.submit(_run, part) for part in range(count)]
        on_progress = make_on_progress()
        reader = threading.Thread(target=lambda: [on_progress(more) for more in iter(answered.get, None)])
        reader.start()
        try:
            return [part.result() for part in parts]
        except BrokenProcessPool:
            raise EngineDeadError("A client process of the benchmark has died.") from None
        finally:
            answered.put(None)
            reader.join()


def _run(part: int) -> Any:
    work, on_progress = _task
    return work(part, on_progress)

"""Users of a real gateway with stand-in workers: the live half of `bough bench gateway`."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import uvloop

from bough.bench.gateway_figures import Served
from bough.bench.gateway_loads import Dialogue, Turn
from bough.bench.gateway_model import answer_text
from bough.bench.gateway_worker import MODEL
from bough.bench.http_client import EventReader, HttpClient, HttpFailure
from bough.core.errors import EngineDeadError


class _Details(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details


class _LastEvent(msgspec.Struct):
    system_fingerprint: str
    usage: _Usage


def drive(url: str, dialogues: Sequence[Dialogue], users: int) -> list[Served]:
    """Each of the users waits for an answer before the next turn is sent."""

    async def run() -> list[Served]:
        client = HttpClient(url)
        waiting, served = iter(dialogues), list[Served]()
        try:
            await asyncio.gather(*(_use(client, waiting, served) for _ in range(users)))
        finally:
            client.close()
        return served

    return uvloop.run(run())


async def _use(client: HttpClient, waiting: Iterator[Dialogue], served: list[Served]) -> None:
    for dialogue in waiting:
        history = ""
        for turn in dialogue:
            prompt = history + turn.text
            served.append(await _ask(client, prompt, turn))
            history = prompt + answer_text(zlib.crc32(prompt.encode()), turn.output_tokens)


async def _ask(client: HttpClient, prompt: str, turn: Turn) -> Served:
    reader, last, first_s = EventReader(), b"", 0.0
    sent_s = time.perf_counter()

    def on_data(data: bytes) -> None:
        nonlocal last, first_s
        events = reader.feed(data)
        if events:
            first_s = first_s or time.perf_counter() - sent_s
            last = events[-1]

    body = {"model": MODEL, "prompt": prompt, "max_tokens": turn.output_tokens, "stream": True}
    try:
        answer = await client.post("/v1/completions", body, on_data)
        if answer.status != 200:
            raise EngineDeadError(f"The gateway answered {answer.status}: {answer.text[:300]}")
        end = msgspec.json.decode(last, type=_LastEvent)
    except (HttpFailure, msgspec.MsgspecError) as error:
        raise EngineDeadError(f"A request of the benchmark failed: {error}") from None
    return Served(
        worker=end.system_fingerprint,
        prompt_tokens=end.usage.prompt_tokens,
        cached_tokens=end.usage.prompt_tokens_details.cached_tokens,
        expected_cached=None,
        output_tokens=end.usage.completion_tokens,
        sent_s=sent_s,
        first_s=first_s,
        total_s=time.perf_counter() - sent_s,
    )

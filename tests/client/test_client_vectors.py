"""Vectors of many texts: how their requests reach the engine."""

from __future__ import annotations

import asyncio

import pytest

from bough.client.inputs import Inputs
from bough.client.vectors import STEPS_AHEAD, Vectors
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.messages.outputs import Delta, Deltas
from bough.messages.requests import Abort, Generate
from tests.fakes.scripted_engine import ScriptedEngine

STEP = 32  # tokens


def vectors_of(engine: ScriptedEngine) -> Vectors:
    async def read(**given: object) -> Inputs:
        return engine.reader.read(**given)  # type: ignore[arg-type]

    return Vectors(engine.client, read, engine.tokenizer, {"is_embedding": True, "chunked_prefill_size": STEP})


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_large_batch_is_sent_a_few_steps_ahead_so_that_others_need_not_wait_for_all_of_it() -> None:
    """The engine takes requests in the order in which they come."""

    async def run() -> None:
        engine = ScriptedEngine(lambda request: None)
        vectors, answered = vectors_of(engine), 0
        texts = [chr(97 + number % 26) * 4 for number in range(200)]
        batch = asyncio.create_task(vectors.encode(prompt=texts))
        await settle()
        ahead = len(engine.requests)
        assert STEP // 4 * (STEPS_AHEAD - 1) < ahead <= STEP // 4 * STEPS_AHEAD
        single = asyncio.create_task(vectors.encode(prompt="alone"))
        await settle()
        assert [engine.prompt_text(request) for request in engine.requests[ahead:]] == ["alone"]
        while not batch.done():
            waiting = engine.requests[answered:]
            assert 0 < len(waiting) <= STEP // 4 * STEPS_AHEAD + 1
            engine.client.receive(Deltas([Delta(waiting[0].handle, "", b"", finish=FinishLength(0))]))
            answered += 1
            await settle()
        assert single.done()
        found = await batch
        assert [answer.index for answer in found] == list(range(200))
        sent = {request.handle: engine.prompt_text(request) for request in engine.requests}
        assert [sent[answer.handle] for answer in found] == texts

    asyncio.run(run())


def test_where_one_text_is_refused_the_others_end() -> None:
    async def run() -> None:
        def script(request: Generate) -> FinishAbort | None:
            return FinishAbort("Too long.", field="input") if len(request.input_ids) > 16 else None

        engine = ScriptedEngine(script)
        with pytest.raises(RequestError, match=r"Too long\."):
            await vectors_of(engine).encode(prompt=["a" * 4] * 8 + ["a" * 9] * 8 + ["a" * 4] * 300)
        await settle()
        ended = {message.handle for message in engine.sent if isinstance(message, Abort)}
        assert {request.handle for request in engine.requests if len(request.input_ids) == 16} == ended
        assert len(engine.requests) < 50

    asyncio.run(run())

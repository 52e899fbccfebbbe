"""From arguments to requests, and from deltas to answers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from bough.client.handle import EngineClient
from bough.client.inputs import InputReader
from bough.core.errors import EngineDeadError, RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.core.seeds import derive_seed
from bough.messages.outputs import Delta, Deltas, Reply, Started
from bough.messages.requests import Abort, FlushCache, Generate
from tests.fakes.tokenizer import ByteTokenizer

READER = InputReader(ByteTokenizer(), {"temperature": 0.5}, random_seed=11)  # type: ignore[arg-type]


def test_one_text_many_texts_ids_and_arrays() -> None:
    one = READER.read(prompt="ab")
    assert not one.batched and one.prompts[0].ids.tolist() == [97, 98]
    many = READER.read(prompt=["a", "b"])
    assert many.batched and len(many.prompts) == 2
    assert READER.read(input_ids=[1, 2]).prompts[0].ids.tolist() == [1, 2]
    assert READER.read(input_ids=[[1], [2]]).batched
    assert READER.read(input_ids=np.array([1, 2])).prompts[0].ids.tolist() == [1, 2]  # type: ignore[arg-type]


def test_n_makes_samples_with_seeds_of_their_own() -> None:
    samples = READER.read(prompt="a", sampling_params={"n": 3, "sampling_seed": 5}, rid="r").prompts
    assert [p.seed for p in samples] == [derive_seed(5, i) for i in range(3)]
    assert [p.rid for p in samples] == ["r-0", "r-1", "r-2"]
    assert READER.read(prompt="a").prompts[0].seed == 11


def test_options_hold_for_all_or_one_by_one() -> None:
    inputs = READER.read(
        prompt=["a", "b"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
        top_logprobs_num=4,
        token_ids_logprob=[7, 8],
        extra_key="k",
        cache_salt=["s", "t"],
    )
    first, second = inputs.prompts
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (1, 2)
    assert first.sampling.temperature == 0.5
    assert first.logprobs is not None and first.logprobs.ids == (7, 8) and second.logprobs is None
    assert first.namespace != second.namespace
    assert READER.read(prompt="a", extra_key="ab").prompts[0].namespace != (
        READER.read(prompt="a", extra_key="a", cache_salt="b").prompts[0].namespace
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1]}, "list of strings"),
        ({"input_ids": "abc"}, "list of token ids"),
        ({"input_ids": [True]}, "whole numbers"),
        ({"input_ids": [[1], [2.5]]}, "whole numbers"),
        ({"input_ids": [2**40]}, "outside the vocabulary"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "1 entries for 2"),
        ({"prompt": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"prompt": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"prompt": "a", "return_logprob": True, "token_ids_logprob": ["x"]}, "token_ids_logprob"),
        ({"prompt": "a", "priority": "high"}, "priority"),
        ({"prompt": "a", "extra_key": 5}, "extra_key"),
    ],
)
def test_each_mistake_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        READER.read(**arguments)


def test_an_engine_without_tokenizer_takes_ids_only() -> None:
    with pytest.raises(RequestError, match="input_ids"):
        InputReader(None, {}, None).read(prompt="a")


class FakeScheduler:
    """Plays the engine: `script` says what comes back for each request."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def delta(handle: int, text: str = "", ids: list[int] | None = None, **more: Any) -> Delta:
    return Delta(handle, text, np.array(ids or [], dtype=np.int32).tobytes(), **more)


def test_deltas_become_a_cumulative_answer() -> None:
    async def go() -> None:
        port = FakeScheduler()
        client = EngineClient(port, ByteTokenizer())  # type: ignore[arg-type]
        task = asyncio.create_task(client.generate(READER.read(prompt="ab", rid="r")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        (message,) = port.sent
        assert isinstance(message, Generate) and not message.stream
        client.receive(Deltas([delta(message.handle, "x", [1], started=Started(message.handle, 1, 0.25))]))
        client.receive(Deltas([delta(message.handle, "y", [2], finish=FinishLength(2)), delta(999, "stray")]))
        answer: Any = await task
        assert answer["text"] == "xy" and answer["output_ids"] == [1, 2]
        meta = answer["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("r", 2, 2, 1)

    asyncio.run(go())


def test_a_slow_reader_gets_several_tokens_in_one_piece() -> None:
    async def go() -> None:
        port = FakeScheduler()
        client = EngineClient(port, ByteTokenizer())  # type: ignore[arg-type]
        stream = client.stream(READER.read(prompt="a"))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        handle = port.sent[0].handle
        client.receive(Deltas([delta(handle, "1", [1])]))
        assert (await first)["text"] == "1"
        for i in range(2, 6):
            client.receive(Deltas([delta(handle, str(i), [i])]))
        client.receive(Deltas([delta(handle, "6", [6], finish=FinishLength(6))]))
        assert [piece["text"] async for piece in stream] == ["123456"]

    asyncio.run(go())


def test_a_caller_who_leaves_aborts_and_a_refusal_raises() -> None:
    async def go() -> None:
        port = FakeScheduler()
        client = EngineClient(port, ByteTokenizer())  # type: ignore[arg-type]
        task = asyncio.create_task(client.generate(READER.read(prompt="a")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert port.sent[-1] == Abort(port.sent[0].handle)
        refused = asyncio.create_task(client.generate(READER.read(prompt="a")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        client.receive(Deltas([delta(port.sent[-1].handle, finish=FinishAbort("too long", 400))]))
        with pytest.raises(RequestError, match="too long"):
            await refused

    asyncio.run(go())


def test_death_reaches_everyone_who_waits_and_everyone_who_comes() -> None:
    async def go() -> None:
        client = EngineClient(FakeScheduler(), ByteTokenizer())  # type: ignore[arg-type]
        waiting = [asyncio.create_task(client.generate(READER.read(prompt="a"))) for _ in range(3)]  # type: ignore[arg-type]
        call = asyncio.create_task(client.flush_cache())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        client.die(EngineDeadError("the scheduler died"))
        for task in [*waiting, call]:
            with pytest.raises(EngineDeadError, match="scheduler died"):
                await task
        with pytest.raises(EngineDeadError):
            await client.generate(READER.read(prompt="a"))

    asyncio.run(go())


def test_calls_are_answered_by_number() -> None:
    async def go() -> None:
        port = FakeScheduler()
        client = EngineClient(port, None)
        task = asyncio.create_task(client.flush_cache())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert isinstance(port.sent[0], FlushCache)
        client.receive(Reply(port.sent[0].call, True, "done"))
        assert (await task).message == "done"

    asyncio.run(go())

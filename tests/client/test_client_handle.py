"""The client's handle: from deltas to answers, and who is told what when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
import pytest

from bough.client.handle import EngineClient
from bough.client.inputs import PART_TOKENS, InputReader
from bough.client.outputs import Piece, Timings
from bough.client.replicas import Replicas
from bough.core.errors import EngineDeadError, RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.core.media import MediaPrompt
from bough.messages.outputs import Delta, Deltas, LogprobRun, Reply, Started
from bough.messages.requests import Abort, FlushCache, Generate
from bough.multimodal.preparer import PreparedPrompt
from tests.fakes.tokenizer import ByteTokenizer

READER = InputReader(ByteTokenizer(), {}, random_seed=11)  # type: ignore[arg-type]


class FakeScheduler:
    """Plays the engine: `script` says what comes back for each request."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.sent += messages


def delta(handle: int, text: str = "", ids: list[int] | None = None, **more: Any) -> Delta:
    return Delta(handle, text, np.array(ids or [], dtype=np.int32).tobytes(), **more)


@pytest.mark.parametrize(
    ("host", "storage", "lower"),
    [
        (None, None, {}),
        (1, None, {}),
        (1, (5, "file"), {"host": 0, "storage": 1, "storage_backend": "file", "disk": 1}),
        (1, (1, "redis"), {"host": 0, "storage": 1, "storage_backend": "redis", "store": 1}),
    ],
)
def test_deltas_become_a_cumulative_answer(host: int | None, storage: Any, lower: dict[str, Any]) -> None:
    async def go() -> None:
        port = FakeScheduler()
        client = EngineClient(Replicas([port]), ByteTokenizer())  # type: ignore[arg-type]
        task = asyncio.create_task(client.generate(READER.read(prompt="ab", rid="r")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        (message,) = port.sent
        assert isinstance(message, Generate) and not message.stream
        started = Started(message.handle, 2, 1, 0.25, host_tokens=host, storage=storage)
        client.receive(Deltas([delta(message.handle, "x", [1], started=started)]))
        client.receive(Deltas([delta(message.handle, "y", [2], finish=FinishLength(2)), delta(999, "stray")]))
        answer: Any = await task
        assert answer["text"] == "xy" and answer["output_ids"] == [1, 2]
        meta = answer["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("r", 2, 2, 1)
        tiers = {"device": 0, "host": 1, "storage": 0, "storage_backend": None, "disk": 0, "store": 0} | lower
        assert meta.get("cached_tokens_details") == (None if host is None else tiers)

    asyncio.run(go())


def test_a_slow_reader_gets_several_tokens_in_one_piece() -> None:
    async def go() -> None:
        port = FakeScheduler()
        client = EngineClient(Replicas([port]), ByteTokenizer())  # type: ignore[arg-type]
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
        client = EngineClient(Replicas([port]), ByteTokenizer())  # type: ignore[arg-type]
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
        client = EngineClient(Replicas([FakeScheduler()]), ByteTokenizer())  # type: ignore[arg-type]
        waiting = [asyncio.create_task(client.generate(READER.read(prompt="a"))) for _ in range(3)]  # type: ignore[arg-type]
        call = asyncio.create_task(client.call(FlushCache))  # type: ignore[arg-type]
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
        client = EngineClient(Replicas([port]), None)
        task = asyncio.create_task(client.call(FlushCache))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert isinstance(port.sent[0], FlushCache)
        client.receive(Reply(port.sent[0].call, True, "done"))
        assert (await task).message == "done"

    asyncio.run(go())


async def begin(stream: AsyncGenerator[dict[str, Any], None]) -> asyncio.Task[dict[str, Any]]:
    """Asks for the first piece, and returns when the requests have been sent."""
    first: asyncio.Task[dict[str, Any]] = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return first


def make_client() -> tuple[EngineClient, FakeScheduler]:
    port = FakeScheduler()
    return EngineClient(Replicas([port]), ByteTokenizer()), port  # type: ignore[arg-type]


def test_a_paused_reader_of_a_batch_finds_each_answer_once() -> None:
    async def go() -> None:
        client, port = make_client()
        stream = client.stream(READER.read(prompt=["a", "b", "c"]))
        first = await begin(stream)
        a, b, c = (message.handle for message in port.sent)
        client.receive(Deltas([delta(b, "1", [1])]))
        assert (await first)["index"] == 1
        for i in range(100):
            client.receive(Deltas([delta(h, "x", [i]) for h in (a, b)]))
        client.receive(Deltas([delta(h, "y", [7], finish=FinishLength(101)) for h in (a, b)]))
        client.receive(Deltas([delta(c, finish=FinishAbort("too long", 400))]))
        pieces = [(p["index"], len(p["output_ids"]), p["meta_info"]["finish_reason"]["type"]) async for p in stream]
        assert pieces == [(0, 101, "length"), (1, 102, "length"), (2, 0, "abort")]

    asyncio.run(go())


def test_logprobs_are_unpacked_once_and_cut_with_the_ids() -> None:
    class CountingTokenizer(ByteTokenizer):
        asked = 0

        def token_text(self, token: int) -> str:
            self.asked += 1
            return super().token_text(token)

    def run(*tokens: int) -> LogprobRun:
        ids = np.array(tokens, dtype=np.int32).tobytes()
        values = np.array([-0.5] * len(tokens), dtype=np.float32).tobytes()
        return LogprobRun(ids, values, 1, values, ids, b"")

    async def go() -> None:
        tokenizer, port = CountingTokenizer(), FakeScheduler()
        client = EngineClient(Replicas([port]), tokenizer)  # type: ignore[arg-type]
        options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        stream = client.stream(READER.read(prompt="ab", return_text_in_logprobs=True, **options))  # type: ignore[arg-type]
        first = await begin(stream)
        handle = port.sent[0].handle
        started = Started(handle, 2, 0, 0.0, run(98))
        client.receive(Deltas([delta(handle, "c", [99], started=started, logprobs=[run(99)])]))
        meta = (await first)["meta_info"]
        assert meta["input_token_logprobs"] == [(None, 97, "a"), (-0.5, 98, "b")]
        assert meta["input_top_logprobs"] == [None, [(-0.5, 98, "b")]]
        for i in range(50):
            client.receive(Deltas([delta(handle, "d", [100], logprobs=[run(100)])]))
            assert len((await anext(stream))["meta_info"]["output_top_logprobs"]) == i + 2
        assert tokenizer.asked == 1 + 2 + 2 + 2 * 50
        client.receive(Deltas([delta(handle, finish=FinishLength(51), logprobs=[run(101)])]))
        assert len((await anext(stream))["meta_info"]["output_token_logprobs"]) == 51

    asyncio.run(go())


def test_an_abort_goes_by_name() -> None:
    async def go() -> None:
        client, port = make_client()
        inputs = [READER.read(prompt="a", rid=rid) for rid in ("job", "job-2", "other")]
        inputs.append(READER.read(prompt="a", rid="many", sampling_params={"n": 2}))
        tasks = [asyncio.create_task(client.generate(i)) for i in inputs]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert [(m.rid, m.names) for m in port.sent[-2:]] == [("many-0", ("many",)), ("many-1", ("many",))]
        port.sent.clear()
        client.abort("job")
        client.abort(abort_all=True)
        assert [(m.handle, m.name) for m in port.sent] == [(None, "job"), (None, None)]
        with pytest.raises(RequestError, match="rid"):
            client.abort("x" * 5000)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(go())


@pytest.mark.parametrize("how", [{"rid": "job"}, {"abort_all": True}])
def test_requests_and_aborts_tell_which_was_first_whatever_is_prepared_between(how: dict[str, Any]) -> None:
    """So the scheduler can tell a request that was aborted while its media were prepared, by any client."""

    class SlowPreparer:
        async def prepare(self, ids: Any, sources: Any) -> PreparedPrompt:
            await ready.wait()
            return PreparedPrompt(ids, MediaPrompt(()), ())

    ready = asyncio.Event()

    async def go() -> None:
        (client, port), (other, others_port) = make_client(), make_client()
        client.preparer = SlowPreparer()  # type: ignore[assignment]
        inputs = READER.read(prompt="a", rid="job", image_data=b"picture")
        early = asyncio.create_task(client.generate(inputs))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        other.abort(**how)
        late = asyncio.create_task(client.generate(READER.read(prompt="a", rid="late", image_data=b"picture")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert port.sent == []
        ready.set()
        await asyncio.sleep(0.01)
        (abort,) = others_port.sent
        first, second = sorted(port.sent, key=lambda message: message.rid)
        assert first.made_at <= abort.made_at <= second.made_at
        assert first.media is not None and (first.rid, second.rid) == ("job", "late")
        early.cancel()
        late.cancel()
        await asyncio.gather(early, late, return_exceptions=True)

    asyncio.run(go())


def test_an_id_is_taken_until_its_request_has_ended() -> None:
    async def go() -> None:
        client, port = make_client()
        stream = client.stream(READER.read(prompt="a", rid="r"))
        first = await begin(stream)
        with pytest.raises(RequestError, match="Duplicate request ID detected: 'r'"):
            await client.generate(READER.read(prompt="a", rid="r"))
        with pytest.raises(RequestError, match="Duplicate request IDs detected within the request: 's'"):
            await client.generate(READER.read(prompt=["a", "b"], rid=["s", "s"]))
        assert len(port.sent) == 1
        client.receive(Deltas([delta(port.sent[0].handle, finish=FinishLength(0))]))
        await first  # complete, though the reader has not come to the end
        again = asyncio.create_task(client.generate(READER.read(prompt="a", rid="r")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert len(port.sent) == 2
        await stream.aclose()
        with pytest.raises(RequestError, match="detected: 'r'"):
            await client.generate(READER.read(prompt="a", rid="r"))
        client.receive(Deltas([delta(port.sent[1].handle, finish=FinishLength(0))]))
        await again

    asyncio.run(go())


def test_what_cannot_be_sent_leaves_nothing_behind() -> None:
    class NarrowScheduler(FakeScheduler):
        def send(self, *messages: Any) -> None:
            if any(getattr(message, "rid", "") == "bad" for message in messages):
                raise OverflowError
            super().send(*messages)

    async def go() -> None:
        port = NarrowScheduler()
        client = EngineClient(Replicas([port]), ByteTokenizer())  # type: ignore[arg-type]
        for _ in range(2):  # the second time no id is in use
            with pytest.raises(OverflowError):
                await client.generate(READER.read(prompt=["a", "b"], rid=["good", "bad"]))
        assert port.sent == [] and client._answers == {} and client._rids == {}

    asyncio.run(go())


def test_the_first_prompts_of_many_are_sent_before_the_last_are_read() -> None:
    long, rids = [7] * (PART_TOKENS // 2), [f"r{number}" for number in range(5)]

    async def go(*prompts: Any, rids: list[str] = rids) -> tuple[FakeScheduler, EngineClient]:
        client, port = make_client()
        inputs = READER.read(input_ids=list(prompts), rid=rids, in_parts=True)
        assert inputs.prompts == () and inputs.batched
        answers = asyncio.create_task(client.generate(inputs))
        await asyncio.sleep(0)
        if answers.done():
            with pytest.raises(RequestError, match=r"whole numbers|IDs detected within the request"):
                await answers
            return port, client
        begun = [message.handle for message in port.sent]
        ends = [delta(handle, "x", [1], finish=FinishLength(1)) for handle in reversed(begun)]
        client.receive(Deltas(ends))
        assert [answer["meta_info"]["id"] for answer in await answers] == rids
        return port, client

    port, client = asyncio.run(go(long, long, long, long, [1, 2]))
    assert [message.followed for message in port.sent] == [True, True, True, True, False]
    assert [len(message.input_ids) // 4 for message in port.sent] == [*[len(long)] * 4, 2]
    # What is wrong behind them ends them.
    wrong = [asyncio.run(go(long, long, long, [1, None], [1])), asyncio.run(go(*[long] * 4, rids=[*rids[:3], "r0"]))]
    for port, client in wrong:
        sent, aborted = port.sent[:2], port.sent[2:]
        assert [message.rid for message in sent] == rids[:2]
        assert aborted == [Abort(message.handle) for message in sent]
        assert client._answers == {} and client._rids == {}


def test_usage_counts_the_prompt_that_was_used() -> None:
    async def go() -> None:
        client, port = make_client()
        inputs = READER.read(prompt="abcdef", return_prompt_token_ids=True)
        task = asyncio.create_task(client.generate(inputs))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        handle = port.sent[0].handle
        started = Started(handle, 4, 1, 0.0)
        last: dict[str, Any] = {"finish": FinishLength(2), "retractions": 2, "weight_version": "new"}
        client.receive(Deltas([delta(handle, "x", [1], started=started)]))
        client.receive(Deltas([delta(handle, "y", [2], **last)]))
        meta: dict[str, Any] = (await task)["meta_info"]  # type: ignore[call-overload]
        assert meta["prompt_tokens"] == 4 and meta["prompt_token_ids"] == list(b"abcd")
        # It was retracted, and other weights have computed the rest.
        assert (meta["num_retractions"], meta["weight_version"], meta["reasoning_tokens"]) == (2, "new", 0)

    asyncio.run(go())


def test_pieces_hold_only_what_is_new_and_cost_only_that() -> None:
    async def go() -> None:
        client, port = make_client()
        pieces = client.pieces(READER.read(prompt="ab", return_logprob=True), stream=True)
        task: asyncio.Task[Piece] = asyncio.create_task(anext(pieces))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        handle = port.sent[0].handle
        client.receive(Deltas([delta(handle, "x", [1])]))
        piece = await task
        assert (piece.text, piece.ids, piece.first, piece.finish, piece.index) == ("x", [1], 0, None, 0)
        client.receive(Deltas([delta(handle, "y", [2])]))
        client.receive(Deltas([delta(handle, "", [3])]))
        piece = await anext(pieces)
        assert (piece.text, piece.ids, piece.first) == ("y", [2, 3], 1) and piece.answer.text == "xy"
        client.receive(Deltas([delta(handle, "z", [4], finish=FinishLength(4))]))
        assert piece.finish is None and piece.answer.text == "xyz"  # a piece is a snapshot, its answer is not
        last = await anext(pieces)
        assert (last.text, last.ids, last.first, last.finish) == ("z", [4], 3, FinishLength(4))
        assert last.answer.text == "xyz" and last.answer.ids == [1, 2, 3, 4]
        assert [piece async for piece in pieces] == []

    asyncio.run(go())


def test_a_request_that_fails_on_its_way_is_a_piece_with_its_reason() -> None:
    async def go() -> None:
        client, port = make_client()
        pieces = client.pieces(READER.read(prompt="ab"), stream=True)
        task: asyncio.Task[Piece] = asyncio.create_task(anext(pieces))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        client.receive(Deltas([delta(port.sent[0].handle, "x", [1])]))
        await task
        client.receive(Deltas([delta(port.sent[0].handle, finish=FinishAbort("not finite", 500))]))
        assert (await anext(pieces)).answer.refusal == FinishAbort("not finite", 500)

    asyncio.run(go())


def test_timings_come_from_the_engine_and_the_clock() -> None:
    timings = Timings.of(Started(0, 10, 4, queue_time_s=1.0, prefill_time_s=0.5), total_s=4.5, output_tokens=7)
    block = msgspec.to_builtins(timings)
    assert (block["time_to_first_token_s"], block["decode_s"], block["tokens_per_second"]) == (1.5, 3.0, 2.0)
    assert (block["prefill_cached_tokens"], block["prefill_new_tokens"]) == (4, 6)
    begun = "queue;dur=1000.000, prefill;dur=500.000, ttft;dur=1500.000"
    tokens = 'tokens;desc="cached=4 new=6"'
    rate = 'tokens_per_second;desc="2.000"'
    assert timings.to_header() == f"{begun}, decode;dur=3000.000, total;dur=4500.000, {tokens}, {rate}"
    assert timings.to_header(finished=False) == f"{begun}, {tokens}"
    assert Timings.of(Started(0, 1, 0, 0.0, prefill_time_s=0.1), total_s=0.1, output_tokens=1).tokens_per_second is None

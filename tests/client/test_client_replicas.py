"""Several schedulers behind one client: which gets a request, what their replies make together, and what a death
leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from bough.client.handle import EngineClient
from bough.client.inputs import InputReader, Inputs
from bough.client.replicas import Replicas, merge_replies
from bough.core.control import RecordExperts, SwapWeights
from bough.core.errors import EngineDeadError, RequestError
from bough.core.finish import FinishLength
from bough.messages.outputs import Delta, Deltas, ReplicaLost, Reply, Started
from bough.messages.requests import Abort, FlushCache, Generate
from tests.fakes.tokenizer import ByteTokenizer

READER = InputReader(ByteTokenizer(), {}, random_seed=11)  # type: ignore[arg-type]
KILLED = ReplicaLost(1, "The scheduler DP1 process (pid 7) was killed by SIGKILL.")


class Port:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.broken = False

    def send(self, *messages: Any) -> None:
        if self.broken:
            raise ValueError("it cannot be encoded")
        self.sent += messages

    @property
    def requests(self) -> list[Generate]:
        return [message for message in self.sent if isinstance(message, Generate)]


class Bench:
    """A client over two or more replicas whose part the test plays."""

    def __init__(self, method: str = "auto", replicas: int = 2) -> None:
        self.ports = [Port() for _ in range(replicas)]
        self.client = EngineClient(Replicas(self.ports, method), ByteTokenizer())  # type: ignore[arg-type]
        self.tasks: list[asyncio.Task[Any]] = []

    async def ask(self, inputs: Inputs) -> asyncio.Task[Any]:
        task = asyncio.create_task(self.client.generate(inputs))  # type: ignore[arg-type]
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def place(self, ids: list[int], **options: Any) -> int:
        """Which replica gets a request, that then runs on."""
        before = [len(port.sent) for port in self.ports]
        await self.ask(READER.read(input_ids=ids, **options))
        (rank,) = [rank for rank, port in enumerate(self.ports) if len(port.sent) > before[rank]]
        return rank

    def start(self, handle: int, ids: list[int]) -> None:
        packed = np.array(ids, dtype=np.int32).tobytes()
        self.client.receive(Deltas([Delta(handle, "x", packed, started=Started(handle, 2, 0, 0.0))]))

    def end(self, handle: int) -> None:
        self.client.receive(Deltas([Delta(handle, "y", b"", finish=FinishLength(1))]))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def played(part: Callable[[Bench], Coroutine[Any, Any, None]], method: str = "auto", replicas: int = 2) -> None:
    async def go() -> None:
        bench = Bench(method, replicas)
        await part(bench)
        await bench.close()

    asyncio.run(go())


def test_the_prompts_of_one_call_are_spread_and_the_answers_say_where_they_were() -> None:
    async def part(bench: Bench) -> None:
        task = await bench.ask(READER.read(input_ids=[[n] * 9 for n in range(8)]))
        assert [len(port.requests) for port in bench.ports] == [4, 4]
        for port in bench.ports:
            for message in port.requests:
                bench.end(message.handle)
        found = Counter(answer["meta_info"]["dp_rank"] for answer in await task)
        assert found == {0: 4, 1: 4}

    played(part)


def test_a_long_prefix_draws_requests_and_that_of_another_namespace_does_not() -> None:
    async def part(bench: Bench) -> None:
        books = [[n] * 2000 for n in range(4)]
        homes = [await bench.place(book) for book in books]
        assert Counter(homes) == {0: 2, 1: 2}
        for port in bench.ports:
            for message in port.requests:
                bench.start(message.handle, [1])
        assert [await bench.place([*book, 9]) for book in books * 2] == homes * 2
        salted = [await bench.place([*books[0], n], extra_key=str(n)) for n in range(6)]
        assert Counter(salted) == {0: 3, 1: 3}
        assert [await bench.place([*books[0], n, 9], extra_key=str(n)) for n in range(6)] == salted

    played(part)


def test_what_has_ended_is_no_load() -> None:
    async def part(bench: Bench) -> None:
        assert Counter([await bench.place([n]) for n in range(4)]) == {0: 2, 1: 2}
        for message in bench.ports[1].requests:
            bench.end(message.handle)
        assert [await bench.place([50 + n]) for n in range(2)] == [1, 1]

    played(part, "total_requests")


def test_the_methods() -> None:
    async def in_turn(bench: Bench) -> None:
        assert [await bench.place([5]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]

    async def by_tokens(bench: Bench) -> None:
        first = await bench.place([5] * 100)
        assert [await bench.place([6] * 20) for _ in range(4)] == [1 - first] * 4

    async def by_requests(bench: Bench) -> None:
        first = await bench.place([5] * 100)
        assert await bench.place([6]) == 1 - first
        assert {await bench.place([7]), await bench.place([8])} == {0, 1}

    played(in_turn, "round_robin", 3)
    played(by_tokens, "total_tokens")
    played(by_requests, "total_requests")


@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank"])
def test_a_request_may_choose_its_replica(field: str) -> None:
    async def part(bench: Bench) -> None:
        assert [await bench.place([5], **{field: 1}) for _ in range(3)] == [1, 1, 1]
        for wrong in (2, -1):
            with pytest.raises(RequestError, match=rf"one of this engine's 2 replicas, counted from 0; got {wrong}"):
                await (await bench.ask(READER.read(input_ids=[5], **{field: wrong})))
        with pytest.raises(RequestError, match="whole number"):
            READER.read(input_ids=[5], **{field: "1"})

    played(part)


def test_ids_that_no_vocabulary_has_are_the_engines_to_refuse() -> None:
    async def part(bench: Bench) -> None:
        await bench.place([2**31 - 1, 0xD800, 3])

    played(part)


def test_a_batch_that_cannot_be_sent_leaves_nothing_behind() -> None:
    async def part(bench: Bench) -> None:
        bench.ports[1].broken = True
        with pytest.raises(ValueError, match="encoded"):
            await (await bench.ask(READER.read(input_ids=[[5], [6]])))
        request, abort = bench.ports[0].sent
        assert abort == Abort(request.handle)
        bench.ports[1].broken = False
        assert await bench.place([5]) in (0, 1)
        assert sum(len(replica.running) for replica in bench.client._replicas.all) == 1

    played(part, "round_robin")


def test_a_command_goes_to_all_and_is_done_when_all_have_done_it() -> None:
    async def part(bench: Bench) -> None:
        task = asyncio.create_task(bench.client.call(FlushCache))
        await asyncio.sleep(0)
        first, second = (port.sent[0].call for port in bench.ports)
        bench.client.receive(Reply(second, True, "done"))
        await asyncio.sleep(0)
        assert not task.done()
        bench.client.receive(Reply(first, False, "2 requests run."))
        reply = await task
        assert not reply.ok
        assert reply.message == "Replica 0: 2 requests run. Of the 2 replicas, 1 did it."
        bench.client.abort("r")
        assert all(port.sent[-1].name == "r" for port in bench.ports)

    played(part)


@pytest.mark.parametrize("how", ["flush", "weights", "refused"])
def test_a_prefix_whose_cache_was_flushed_draws_no_requests(how: str) -> None:
    """Both replicas were sent the book; one has less to do, and gets what follows once nobody holds it."""

    async def part(bench: Bench) -> None:
        book = [7] * 4000
        home = await bench.place(book)
        message = bench.ports[home].requests[0]
        bench.start(message.handle, [1])
        assert await bench.place([*book, 1]) == home
        if how == "weights":
            change = bench.client.update_weights(SwapWeights("m", "auto"))
        else:
            change = bench.client.call(FlushCache)
        task = asyncio.create_task(change)
        await asyncio.sleep(0)
        for port in bench.ports:
            bench.client.receive(Reply(port.sent[-1].call, how != "refused", "done"))
        await task
        assert (await bench.place([*book, 2]) == home) == (how == "refused")

    played(part)


def test_how_often_experts_were_chosen_is_summed_over_replicas() -> None:
    async def part(bench: Bench) -> None:
        task = asyncio.create_task(bench.client.record_experts("dump"))
        await asyncio.sleep(0)
        for port, counts in zip(bench.ports, ("[[0, 0], [1, 2]]", "[[0, 0], [10, 20]]"), strict=True):
            assert port.sent[0].command == RecordExperts("dump")
            bench.client.receive(Reply(port.sent[0].call, True, counts))
        assert (await task).data == {"logical_count": [[0, 0], [11, 22]]}

    played(part)


def test_replies_are_merged() -> None:
    done = {0: Reply(1, True, "Cache flushed.", {"n": 2}), 1: Reply(2, True, "Cache flushed.", {"n": 3})}
    assert merge_replies(done) == Reply(1, True, "Cache flushed.", {"n": 5})
    files = {0: Reply(1, True, "It is in a."), 1: Reply(2, True, "It is in b.")}
    assert merge_replies(files).message == "It is in a. It is in b."
    assert merge_replies({1: Reply(2, False, "busy")}) == Reply(2, False, "busy")


def test_states_are_those_of_the_replicas_that_answer_in_time() -> None:
    async def part(bench: Bench) -> None:
        task = asyncio.create_task(bench.client.states(0.01))
        await asyncio.sleep(0)
        bench.client.receive(Reply(bench.ports[1].sent[0].call, True, data={"paused": False}))
        assert await task == [{"paused": False, "dp_rank": 1}]
        assert not any(replica.calls for replica in bench.client._replicas.all)

    played(part)


def test_a_death_fails_what_has_begun_and_moves_the_rest() -> None:
    async def part(bench: Bench) -> None:
        others = [await bench.ask(READER.read(input_ids=[n], routed_dp_rank=1)) for n in (1, 2)]
        moving = await bench.ask(READER.read(input_ids=[3]))
        begun = await bench.ask(READER.read(input_ids=[4]))
        stale, running = bench.ports[0].requests
        bench.start(running.handle, [5])
        bench.client.receive(ReplicaLost(0, "The scheduler DP0 process (pid 6) was killed by SIGKILL."))
        moved = bench.ports[1].requests[-1]
        assert moved.input_ids == stale.input_ids and moved.rid == stale.rid and moved.handle != stale.handle
        bench.start(stale.handle, [9])  # was on its way when the replica died
        bench.start(moved.handle, [6])
        bench.end(moved.handle)
        answer = await moving
        assert answer["output_ids"] == [6] and answer["meta_info"]["dp_rank"] == 1
        with pytest.raises(EngineDeadError, match=r"DP0 process .* killed by SIGKILL"):
            await begun
        bench.client.receive(KILLED)
        for task in others:
            with pytest.raises(EngineDeadError, match=r"DP1 process .* killed by SIGKILL"):
                await task

    played(part)


def test_a_request_whose_replica_died_twice_may_be_the_reason() -> None:
    async def part(bench: Bench) -> None:
        task = await bench.ask(READER.read(input_ids=[1]))
        for _ in range(2):
            (rank,) = [n for n, port in enumerate(bench.ports) if port.requests]
            bench.ports[rank].sent.clear()
            bench.client.receive(ReplicaLost(rank, f"Replica {rank} was killed."))
        with pytest.raises(EngineDeadError, match=f"Replica {rank} was killed"):
            await task
        assert not any(port.requests for port in bench.ports)
        assert len(bench.client.dead_replicas) == 2

    played(part, replicas=3)


def test_a_request_that_chose_a_replica_dies_with_it() -> None:
    async def part(bench: Bench) -> None:
        task = await bench.ask(READER.read(input_ids=[1], routed_dp_rank=1))
        bench.client.receive(KILLED)
        with pytest.raises(EngineDeadError, match="DP1"):
            await task
        assert not bench.ports[0].sent

    played(part)


def test_the_living_serve_on() -> None:
    async def part(bench: Bench) -> None:
        flush = asyncio.create_task(bench.client.call(FlushCache))
        await asyncio.sleep(0)
        bench.client.receive(KILLED)
        bench.client.receive(Reply(bench.ports[0].sent[0].call, True, "Cache flushed."))
        assert await flush == Reply(bench.ports[0].sent[0].call, True, "Cache flushed.")
        assert bench.client.dead_replicas == {"1": KILLED.reason}
        before = len(bench.ports[1].sent)
        assert [await bench.place([n]) for n in range(4)] == [0] * 4
        with pytest.raises(EngineDeadError, match="It was replica 1; leave routed_dp_rank out"):
            await (await bench.ask(READER.read(input_ids=[5], routed_dp_rank=1)))
        bench.client.abort(abort_all=True)
        assert len(bench.ports[1].sent) == before

    played(part)


def test_when_the_engine_dies_so_does_every_call() -> None:
    async def part(bench: Bench) -> None:
        task = await bench.ask(READER.read(input_ids=[[5], [6]]))
        call = asyncio.create_task(bench.client.call(FlushCache))
        await asyncio.sleep(0)
        bench.client.die(EngineDeadError("gone"))
        for each in (task, call):
            with pytest.raises(EngineDeadError, match="gone"):
                await each

    played(part)

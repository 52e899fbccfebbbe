"""Random frames at every internal socket: each is a message, or an error that its receiver names. What a socket serves
goes on afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from bough.core.plan import StepResult
from bough.disaggregation.link import Link
from bough.disaggregation.wire import Cancel, ToDecode, ToPrefill
from bough.gateway.kv_feed import Publisher, Subscription
from bough.launch import nodes
from bough.launch.kv_events import KVEventPublisher
from bough.memory.tree.events import END_OF_REPLAY, BlockStored, parse_config
from bough.messages.channels import Receiver
from bough.messages.outputs import StepOutput, ToClient, ToDetokenizer
from bough.messages.ranks import ToRank, unpack_array
from bough.messages.requests import Abort, FlushCache, Garbled, Generate, ToScheduler
from bough.storage.memory import MemoryServer
from tests.fakes.boxes import generate

LENGTHS = [pytest.param(400, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.long)]
GOOD: list[Any] = [
    generate(1, [1, 2, 3], stop=("x",), temperature=0.5),
    Abort(1),
    FlushCache(4),
    StepOutput(b"12345678", b"1234", b"", [], [], {}, {}),
    {"type": "Generate", "handle": 3},
    {"type": "LaunchPlan", "plan": {}},
    {"type": "CopyPages", "pages": ["<i4", [3], b"123"], "group": 0},
    [0, [["BlockStored", [1], None, [1], 1]], 0],
]
ODD: list[Any] = [
    None,
    True,
    -1,
    2**63,
    2**64 - 1,
    0.5,
    float("nan"),
    "",
    "\x00",
    b"",
    b"\xff" * 9,
    [],
    {},
    [[[]]],
    {"": 0},
]


def damaged(draw: random.Random, value: Any) -> Any:
    """The same with something odd in one place."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        return {**value, key: damaged(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], damaged(draw, value[place]), *value[place + 1 :]]
    return draw.choice(ODD)


def frames(count: int, good: list[Any] = GOOD) -> Iterator[bytes]:
    """Noise, messages with bytes changed, cut or doubled, and well-formed ones with an odd value."""
    draw = random.Random(19)
    encoded = [msgspec.msgpack.encode(message) for message in good]
    plain = [msgspec.msgpack.decode(frame) for frame in encoded]
    for _ in range(count):
        frame = bytearray(draw.choice(encoded))
        match draw.randrange(5):
            case 0:
                frame = bytearray(draw.randbytes(draw.randrange(200)))
            case 1:
                for _ in range(draw.randrange(1, 5)):
                    frame[draw.randrange(len(frame))] = draw.randrange(256)
            case 2:
                frame = frame[: draw.randrange(len(frame))]
            case 3:
                frame = frame * 2
            case _:
                frame = bytearray(msgspec.msgpack.encode(damaged(draw, draw.choice(plain))))
        yield bytes(frame)


UNIONS = {
    "scheduler": ToScheduler,
    "detokenizer": ToDetokenizer,
    "client": ToClient,
    "rank": ToRank,
    "results": StepResult,
}


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", UNIONS)
def test_a_frame_is_a_message_or_a_named_error(tmp_path: Path, name: str, count: int) -> None:
    """Of the engine's own sockets, behind rights 0700. Where clients' requests pass, nothing is raised at all."""
    context: zmq.Context[Any] = zmq.Context()
    garbled = Garbled if name == "scheduler" else None
    receiver: Receiver[Any] = Receiver(context, f"ipc://{tmp_path}/{name}", UNIONS[name], garbled, unpack_array)
    push = context.socket(zmq.PUSH)
    push.connect(f"ipc://{tmp_path}/{name}")
    taken = refused = 0
    try:
        for frame in frames(count):
            push.send(frame)
            try:
                messages = receiver.receive(10.0)
            except (msgspec.DecodeError, UnicodeDecodeError):
                assert garbled is None
                refused += 1
            else:
                assert len(messages) == 1
                refused += isinstance(messages[0], Garbled)
                taken += not isinstance(messages[0], Garbled)
        assert taken + refused == count and refused
    finally:
        push.close(linger=0)
        receiver.close()
        context.destroy(0)


@pytest.mark.parametrize("count", LENGTHS)
def test_the_link_between_prefill_and_decode_engines(tmp_path: Path, count: int) -> None:
    heard: list[Any] = []
    side: Any = SimpleNamespace(
        receive=lambda peer, message, payload, now: heard.append(message), lost=lambda peer: None, tick=lambda now: None
    )
    context: zmq.Context[Any] = zmq.Context()
    link = Link(context, ToPrefill, 5.0, None, f"ipc://{tmp_path}/link")
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{tmp_path}/link")
    try:
        draw = random.Random(3)
        for frame in frames(count):
            stranger.send_multipart([frame, *(draw.randbytes(9) for _ in range(draw.randrange(3)))])
        stranger.send(msgspec.msgpack.encode(Cancel(7)))
        while Cancel(7) not in heard:
            assert link.poller.poll(10_000), "the link has stopped to listen"
            link.turn(side)
    finally:
        context.destroy(0)


def test_both_sides_of_a_pair_name_what_they_cannot_read() -> None:
    for union in (ToPrefill, ToDecode):
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)
        for frame in frames(300):
            try:
                decoder.decode(frame)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                assert str(error)


@pytest.mark.parametrize("count", LENGTHS)
def test_replays_of_cache_events(tmp_path: Path, count: int) -> None:
    config = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replays"}
    publisher = KVEventPublisher(parse_config(json.dumps(config)))
    context: zmq.Context[Any] = zmq.Context()
    stranger, reader = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    try:
        publisher.add(BlockStored((1,), None, (1,), 1))
        publisher.flush()
        for socket in (stranger, reader):
            socket.connect(config["replay_endpoint"])
        draw = random.Random(5)
        for frame in frames(count):
            stranger.send_multipart([draw.randbytes(draw.randrange(3)) for _ in range(draw.randrange(3))] + [frame])
        reader.send_multipart([b"", (0).to_bytes(8, "big")])
        assert reader.poll(20_000), "replays are no longer answered"
        assert len(reader.recv_multipart()) == 3
    finally:
        context.destroy(0)
        publisher.close()


@pytest.mark.parametrize("count", LENGTHS)
def test_a_worker_that_publishes_noise_is_dropped_and_nothing_else(tmp_path: Path, count: int) -> None:
    """Its numbers too: some of them do not fit where a replay is asked for."""
    gone: list[str] = []

    class Observer:
        def observe(self, worker_id: str, event: Any) -> None: ...

        def restart(self, worker_id: str) -> None: ...

        def unobserved(self, worker_id: str) -> None:
            gone.append(worker_id)

    async def follow(number: int, frame: bytes) -> None:
        ends = [f"ipc://{tmp_path}/{name}" for name in ("events", "replays")]
        theirs, ours = zmq.asyncio.Context(), zmq.asyncio.Context()
        publisher, replays = theirs.socket(zmq.XPUB), theirs.socket(zmq.ROUTER)
        publisher.bind(ends[0])
        replays.bind(ends[1])

        async def no_replay() -> None:
            while True:
                client, *_ = await replays.recv_multipart()
                await replays.send_multipart([client, b"", END_OF_REPLAY, b""])

        observer: Any = Observer()
        answering = asyncio.create_task(no_replay())
        following = asyncio.create_task(Subscription(ours, "w", "", Publisher("zmq", *ends), observer, None).run())
        try:
            async with asyncio.timeout(20.0):
                await publisher.recv()  # it has subscribed
                for place, payload in enumerate((frame, b"\xc1", b"\xc1")):
                    name = (number + 2 * place).to_bytes(30, "big").lstrip(b"\0")
                    await publisher.send_multipart([b"", name, payload])
                await following
        finally:
            for task in (answering, following):
                task.cancel()
            await asyncio.gather(answering, following, return_exceptions=True)
            for context in (theirs, ours):
                context.destroy(0)

    draw = random.Random(11)
    for frame in list(frames(count // 20, GOOD[-1:])):
        before = len(gone)
        asyncio.run(follow(draw.choice([0, 1, 2**63, 2**64 - 1, 2**64, 2**100]), frame))
        assert len(gone) == before + 1


@pytest.mark.parametrize("count", LENGTHS)
def test_the_store_in_memory_answers_noise_with_nothing_found(tmp_path: Path, count: int) -> None:
    server = MemoryServer(f"ipc://{tmp_path}/store", 10_000)
    draw = random.Random(13)
    for frame in frames(count):
        operation = draw.choice([b"exists", b"get", b"put", b"remove", b"", frame])
        answer = server.answer(operation, [zmq.Frame(draw.choice([frame, b"k"])) for _ in range(draw.randrange(5))])
        assert isinstance(answer, list) and answer
        assert server._used <= 10_000


@pytest.mark.parametrize("count", LENGTHS)
def test_hosts_that_join(count: int) -> None:
    for frame in frames(count):
        try:
            nodes.decode(frame)
        except nodes.UNREADABLE as error:
            assert str(error)


def test_the_good_ones_are_good() -> None:
    """Else the damage would be done to what nobody would take anyway."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToScheduler)
    assert isinstance(decoder.decode(msgspec.msgpack.encode(GOOD[0])), Generate)

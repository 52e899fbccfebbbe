"""Channels: what goes in comes out, in order, and waiting costs nothing."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bough.core.control import ReadWeight, ReceiveTensors
from bough.core.finish import FinishAbort, FinishLength, FinishStop, finish_to_dict
from bough.messages import channels
from bough.messages.channels import Addresses, Receiver, Sender, listen_at, own_address
from bough.messages.outputs import Delta, Deltas, Ended, LogprobRun, Started, StepOutput, ToClient, ToDetokenizer
from bough.messages.requests import Abort, ChangeAdapters, Command, Control, FlushCache, Garbled, Generate, ToScheduler
from tests.fakes.boxes import generate


def test_messages_arrive_whole_and_in_order(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = Addresses.in_folder(tmp_path).scheduler
    receiver: Receiver[ToScheduler] = Receiver(context, address, ToScheduler)
    sender = Sender(context, address)
    assert receiver.receive(0.0) == [] and receiver.receive(0.01) == []
    sent = [generate(1, [1, 2, 3], stop=("x",), temperature=0.5), Abort(1), Abort(None), FlushCache(4)]
    for message in sent:
        sender.send(message)
    received: list[ToScheduler] = []
    while len(received) < len(sent):
        received += receiver.receive(5.0)
    assert received == sent
    sender.close()
    receiver.close()
    context.term()


def receive_frame(folder: Path, frame: bytes) -> list[ToScheduler]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = Addresses.in_folder(folder).scheduler
    receiver: Receiver[ToScheduler] = Receiver(context, address, ToScheduler, Garbled)
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    socket.send(frame)
    received = receiver.receive(5.0)
    receiver.close()
    context.destroy()
    return received


@pytest.mark.parametrize("field", Generate.__struct_fields__)
def test_a_wrong_type_in_any_field_of_a_request_is_handed_on_as_garbled(tmp_path: Path, field: str) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(generate(7, [1, 2], priority=1, stream=True)))
    (message,) = receive_frame(tmp_path, msgspec.msgpack.encode({**fields, field: [["wrong"]]}))
    assert isinstance(message, Garbled) and field in message.error
    assert message.handle == (None if field == "handle" else 7)


@pytest.mark.parametrize(
    ("command", "at"),
    [
        (ChangeAdapters(9, 5), "name"),  # type: ignore[arg-type]
        (Control(call=9, command=ReadWeight("a", -1)), "truncate_size"),
        (Control(call=9, command=ReceiveTensors(("a",), ("float32",), ((2, -1),))), "shapes"),
    ],
)
def test_a_wrong_value_in_a_command_is_handed_on_with_the_number_of_its_call(
    tmp_path: Path, command: Command, at: str
) -> None:
    (message,) = receive_frame(tmp_path, msgspec.msgpack.encode(command))
    assert isinstance(message, Garbled) and message.handle == 9 and at in message.error


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa6handle\xa1\xff"])
def test_noise_is_garbled_and_belongs_to_nobody(tmp_path: Path, frame: bytes) -> None:
    (message,) = receive_frame(tmp_path, frame)
    assert isinstance(message, Garbled) and message.handle is None and message.error


def test_all_of_several_messages_go_out_or_none(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = Addresses.in_folder(tmp_path).scheduler
    receiver: Receiver[ToScheduler] = Receiver(context, address, ToScheduler)
    sender = Sender(context, address)
    with pytest.raises(OverflowError):
        sender.send(Abort(1), Abort(2**70))
    sender.send(Abort(3), Abort(4))
    received: list[ToScheduler] = []
    while len(received) < 2:
        received += receiver.receive(5.0)
    assert received == [Abort(3), Abort(4)]
    sender.close()
    receiver.close()
    context.term()


def test_messages_of_one_call_arrive_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a number: the parts of one message of ZeroMQ, of which either all are there or none."""
    monkeypatch.setattr(channels, "TOGETHER", 20)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = Addresses.in_folder(tmp_path).scheduler
    socket = context.socket(zmq.PULL)
    socket.bind(address)
    sender = Sender(context, address)
    prompts = [generate(handle, [1] * 3000) for handle in range(50)]
    sender.send()
    sender.send(*prompts)
    parts = [socket.recv_multipart() for _ in range(3)]
    assert [len(each) for each in parts] == [20, 20, 10]
    decoder = msgspec.msgpack.Decoder(ToScheduler)
    assert [decoder.decode(frame) for each in parts for frame in each] == prompts
    sender.close()
    receiver: Receiver[ToScheduler] = Receiver(context, f"{address}2", ToScheduler)
    sender = Sender(context, f"{address}2")
    sender.send(*prompts)
    received = list[ToScheduler]()
    while len(received) < len(prompts):
        received += receiver.receive(5.0)
    assert received == prompts
    context.destroy()


def test_between_hosts_only_holders_of_the_key_hear_what_is_sent() -> None:
    with contextlib.ExitStack() as cleanup:
        context: zmq.Context[Any] = zmq.Context()
        cleanup.callback(context.destroy, 0)
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        sender = Sender(context, address, listeners={address: listener.detach()}, key="k" * 32)
        stranger, friend = (Receiver(context, address, ToScheduler, key=key * 32) for key in "xk")
        plain = context.socket(zmq.PULL)
        plain.connect(address)
        sent = [FlushCache(call=number) for number in range(20)]
        sender.send(*sent)
        heard: list[Any] = []
        while len(heard) < len(sent):
            heard += friend.receive(10.0) or pytest.fail("nothing came")
        assert heard == sent
        assert not stranger.receive(0.2) and not plain.poll(0)


def test_every_output_form_survives_the_wire() -> None:
    run = LogprobRun(b"\0" * 4, b"\0" * 4, 0, b"", b"", b"")
    endings = [Ended(1, FinishStop(3), 0), Ended(2, FinishStop("x"), 1), Ended(3, FinishAbort("no", 500), 0)]
    step = StepOutput(b"12345678", b"1234", b"", [Started(1, 9, 2, 0.5, run)], endings, {1: run}, {2: (1, "v2")})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=ToDetokenizer) == step
    deltas = Deltas([Delta(1, "a", b"", None, [run], FinishLength(2), 1)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(deltas), type=ToClient) == deltas


def test_finish_reasons_have_sglangs_form() -> None:
    assert finish_to_dict(FinishStop(2)) == {"type": "stop", "matched": 2}
    assert finish_to_dict(FinishLength(5)) == {"type": "length", "length": 5}
    assert finish_to_dict(FinishAbort("m", 400, "E")) == {
        "type": "abort",
        "message": "m",
        "status_code": 400,
        "err_type": "E",
    }


@pytest.mark.parametrize("where", ["127.0.0.1:80", "tcp://[::ffff:127.0.0.1]:80"])
def test_a_host_listens_where_another_reaches_it(where: str) -> None:
    address, listener = listen_at(own_address(where))
    with listener:
        assert address == f"tcp://127.0.0.1:{listener.getsockname()[1]}"

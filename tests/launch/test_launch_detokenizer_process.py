"""Every client gets its own share of a step's news, in one message."""

from __future__ import annotations

from typing import Any

from bough.messages.channels import first_handle
from bough.messages.outputs import Delta, Deltas
from bough.tokenizer.detokenizer import ChannelOutlet


class Sent:
    """The way to one client."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


class Clients(list[Sent]):
    """The ways to all of them."""

    def reply(self, message: Any) -> None:
        raise AssertionError("nobody has asked for a reply")


def test_deltas_and_replays_go_to_those_who_asked() -> None:
    clients = Clients([Sent(), Sent(), Sent()])
    outlet = ChannelOutlet(clients, Sent())  # type: ignore[arg-type]
    here, there = first_handle(0), first_handle(2)
    news, known, end = Delta(here, "a", b""), Delta(there, "b", b""), Delta(there, "", b"")
    outlet.deltas(Deltas([news, end], [known]))
    assert [client.messages for client in clients] == [[Deltas([news])], [], [Deltas([end], [known])]]


def test_a_lone_client_gets_the_message_as_it_is() -> None:
    client = Sent()
    message = Deltas([], [Delta(first_handle(0), "b", b"")])
    ChannelOutlet(Clients([client]), Sent()).deltas(message)  # type: ignore[arg-type]
    assert client.messages == [message]

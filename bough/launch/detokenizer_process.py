"""The detokenizer process: tokens from the scheduler, text to the client."""

from collections.abc import Callable
from typing import Any

import zmq

from bough.core.child_environment import settle_garbage
from bough.launch.parts import open_tokenizer
from bough.launch.spec import ChildSpec
from bough.messages.channels import ClientSenders, Receiver, Sender, client_of
from bough.messages.outputs import Deltas, Reply, ToDetokenizer
from bough.messages.requests import ProcessCommand
from bough.observability.logs import set_up_logging
from bough.tokenizer.detokenizer import Detokenizer


class ChannelOutlet:
    def __init__(self, clients: ClientSenders, scheduler: Sender) -> None:
        self._clients, self.stream_ended = clients, scheduler.send

    def deltas(self, message: Deltas) -> None:
        """Each client gets its deltas of the step in one message."""
        if len(self._clients) == 1:
            self._clients[0].send(message)
            return
        shares: dict[int, Deltas] = {}
        for delta in message.items:
            shares.setdefault(client_of(delta.handle), Deltas([], [])).items.append(delta)
        for replay in message.replays:
            shares.setdefault(client_of(replay.handle), Deltas([], [])).replays.append(replay)
        for client, share in shares.items():
            self._clients[client].send(share)

    def reply(self, message: Reply) -> None:
        self._clients.reply(message)

    def tell_clients(self, message: ProcessCommand) -> None:
        for client in self._clients:
            client.send(message)


def run_detokenizer(spec: ChildSpec, announce: Callable[..., None]) -> None:
    settings = spec.parse_settings()
    set_up_logging(spec.title, settings.process.log_level)
    context: zmq.Context[Any] = zmq.Context()
    inbox: Receiver[ToDetokenizer] = Receiver(context, spec.addresses.detokenizer, ToDetokenizer)
    outlet = ChannelOutlet(ClientSenders(context, spec.addresses), Sender(context, spec.addresses.scheduler))
    tokenizer = open_tokenizer(spec.files, settings.model)
    detokenizer = Detokenizer(tokenizer, outlet, settings.scheduler.stream_interval)
    settle_garbage()
    announce(ready={})
    serving = True
    while serving:
        for message in inbox.receive(None):
            serving = detokenizer.handle(message) and serving
    context.destroy(linger=500)

"""The detokenizer process: tokens from the scheduler, text to the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from bough.launch.parts import open_tokenizer
from bough.launch.spec import ChildSpec
from bough.messages.channels import Receiver, Sender
from bough.messages.outputs import Deltas, ToDetokenizer
from bough.messages.requests import StreamEnded
from bough.observability.logs import set_up_logging
from bough.tokenizer.detokenizer import Detokenizer


class ChannelOutlet:
    """The detokenizer's news over the engine's channels."""

    def __init__(self, client: Sender, scheduler: Sender) -> None:
        self._client = client
        self._scheduler = scheduler

    def deltas(self, message: Deltas) -> None:
        self._client.send(message)

    def stream_ended(self, message: StreamEnded) -> None:
        self._scheduler.send(message)


def run_detokenizer(spec: ChildSpec, announce: Callable[..., None]) -> None:
    settings = spec.parse_settings()
    set_up_logging("detokenizer", settings.process.log_level)
    context: zmq.Context[Any] = zmq.Context()
    inbox: Receiver[ToDetokenizer] = Receiver(context, spec.addresses.detokenizer, ToDetokenizer)
    outlet = ChannelOutlet(Sender(context, spec.addresses.client), Sender(context, spec.addresses.scheduler))
    tokenizer = open_tokenizer(spec.files, settings.model)
    detokenizer = Detokenizer(tokenizer, outlet, settings.scheduler.stream_interval)
    announce(ready={})
    serving = True
    while serving:
        for message in inbox.receive(None):
            serving = detokenizer.handle(message) and serving
    context.destroy(linger=500)

"""The detokenizer process: tokens from the scheduler, text to the client."""

from collections.abc import Callable
from typing import Any

import zmq

from bough.core.child_environment import settle_garbage
from bough.launch.parts import open_tokenizer
from bough.launch.spec import ChildSpec
from bough.messages.channels import ClientSenders, Receiver, Sender
from bough.messages.outputs import ToDetokenizer
from bough.observability.logs import set_up_logging
from bough.tokenizer.detokenizer import ChannelOutlet, Detokenizer


def run_detokenizer(spec: ChildSpec, announce: Callable[..., None]) -> None:
    settings = spec.parse_settings()
    set_up_logging(spec.title, settings.process.log_level)
    context: zmq.Context[Any] = zmq.Context()
    inbox: Receiver[ToDetokenizer] = Receiver(context, spec.addresses.detokenizer, ToDetokenizer)
    addresses, key = spec.addresses, spec.cluster_key
    outlet = ChannelOutlet(ClientSenders(context, addresses, key), Sender(context, addresses.scheduler, key=key))
    detokenizer = Detokenizer(open_tokenizer(spec.files, settings.model), outlet, settings.scheduler.stream_interval)
    settle_garbage()
    announce(ready={})
    serving = True
    while serving:
        for message in inbox.receive(None):
            serving = detokenizer.handle(message) and serving
    context.destroy(linger=500)

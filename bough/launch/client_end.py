"""The client's end of the engine's channels, on the event loop that opens it.

Owns the sockets and the client on them. Everything but `die` is called on that loop. Made empty, so that whoever must
close it can promise so before it is opened; closing one that is not, or only half, open is fine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from bough.client.handle import EngineClient
from bough.client.watching import RequestWatcher
from bough.core.errors import EngineDeadError
from bough.messages.channels import Addresses, Sender, decoder_of
from bough.messages.outputs import ToClient
from bough.messages.requests import Shutdown
from bough.observability.request_meter import RequestMeter
from bough.tokenizer.tokenizer import Tokenizer


class ClientEnd:
    """Connects one event loop with one engine. `number` tells the clients of an engine apart."""

    def __init__(self, addresses: Addresses, number: int = 0) -> None:
        self._addresses = addresses
        self.number = number
        self._context = zmq.asyncio.Context()
        self._senders: list[Sender] = []  # to the scheduler, to the detokenizer
        self._inbox: zmq.asyncio.Socket | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._client: EngineClient | None = None
        self._death: EngineDeadError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        plain: zmq.Context[Any] = zmq.Context.shadow(self._context)
        for address in (self._addresses.scheduler, self._addresses.detokenizer):
            self._senders.append(Sender(plain, address))
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(self._addresses.clients[self.number])
        self._receiving = asyncio.create_task(self._receive(self._inbox))

    @property
    def folder(self) -> Path:
        """Shared by all clients of the engine."""
        return self._addresses.folder

    def connect(
        self,
        tokenizer: Tokenizer | None,
        meter: RequestMeter | None = None,
        watchers: Sequence[RequestWatcher] = (),
    ) -> EngineClient:
        self._client = EngineClient(self._senders[0], tokenizer, self.number, meter=meter, watchers=watchers)
        if self._death is not None:
            self._client.die(self._death)
        return self._client

    def die(self, error: EngineDeadError) -> None:
        """The engine has ended. Called by the supervisor's thread."""

        def tell() -> None:
            self._death = error
            if self._client is not None:
                self._client.die(error)

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self._loop.call_soon_threadsafe(tell)

    def say_goodbye(self) -> None:
        """Tells the engine to end, and everyone who waits that it does."""
        for sender in self._senders:
            sender.send(Shutdown())
        if self._client is not None:
            self._client.die(EngineDeadError("This engine was shut down."))

    def close(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        if self._inbox is not None:
            self._inbox.close()
        for sender in self._senders:
            sender.close()

    def terminate(self) -> None:
        """Waits until the last words are out; after `close`, on any thread."""
        self._context.term()

    async def _receive(self, inbox: zmq.asyncio.Socket) -> None:
        decoder = decoder_of(ToClient)
        while True:
            message = decoder.decode(await inbox.recv())
            if self._client is not None:
                self._client.receive(message)

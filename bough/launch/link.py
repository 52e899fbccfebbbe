"""The client's end of the engine's channels, on an event loop in a thread of its own.

Owns that thread, its loop, the sockets and the client on them. Made empty, so that whoever must close it can promise so
before it is opened; closing one that is not, or only half, open is fine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from bough.client.handle import EngineClient
from bough.core.errors import EngineDeadError
from bough.messages.channels import Addresses, Sender, decoder_of
from bough.messages.outputs import ToClient
from bough.messages.requests import Shutdown
from bough.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


class Link:
    """Connects one caller's process with one engine."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._context = zmq.asyncio.Context()
        self._senders: list[Sender] = []  # to the scheduler, to the detokenizer
        self._inbox: zmq.asyncio.Socket | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._client: EngineClient | None = None
        self._death: EngineDeadError | None = None
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="bough-client")

    def open(self) -> None:
        self._thread.start()
        self._run(self._open()).result()

    def connect(self, tokenizer: Tokenizer | None) -> EngineClient:
        return self._run(self._make_client(tokenizer)).result()

    def runs_here(self) -> bool:
        """Whether the caller is on the link's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def die(self, error: EngineDeadError) -> None:
        """Called by the supervisor's thread."""

        def tell() -> None:
            self._death = error
            if self._client is not None:
                self._client.die(error)

        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self.loop.call_soon_threadsafe(tell)

    def say_goodbye(self) -> None:
        async def send() -> None:
            for sender in self._senders:
                sender.send(Shutdown())
            if self._client is not None:
                self._client.die(EngineDeadError("This engine was shut down."))

        if self._thread.is_alive():
            self._run(send()).result()

    def close(self) -> None:
        async def stop() -> None:
            if self._receiving is not None:
                self._receiving.cancel()
            if self._inbox is not None:
                self._inbox.close()
            for sender in self._senders:
                sender.close()

        if self._thread.is_alive():
            self._run(stop()).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
        self._context.term()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _open(self) -> None:
        plain: zmq.Context[Any] = zmq.Context.shadow(self._context)
        for address in (self._addresses.scheduler, self._addresses.detokenizer):
            self._senders.append(Sender(plain, address))
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(self._addresses.client)
        self._receiving = asyncio.create_task(self._receive(self._inbox))

    async def _make_client(self, tokenizer: Tokenizer | None) -> EngineClient:
        self._client = EngineClient(self._senders[0], tokenizer)
        if self._death is not None:
            self._client.die(self._death)
        return self._client

    async def _receive(self, inbox: zmq.asyncio.Socket) -> None:
        decoder = decoder_of(ToClient)
        while True:
            message = decoder.decode(await inbox.recv())
            if self._client is not None:
                self._client.receive(message)

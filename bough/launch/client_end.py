"""The client's end of the engine's channels: `ClientEnd` on the event loop that opens it, `Link` on a loop in a thread
of its own, for callers that have no loop or another one.

Both are made empty, so that their owner can register `close` before `open`: closing one that is not, or only half, open
is fine.
"""

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq

from bough.client.handle import EngineClient, RequestWatcher
from bough.client.replicas import Replicas
from bough.core.errors import EngineDeadError
from bough.messages.channels import Addresses, Receiver, Sender
from bough.messages.outputs import ReplicaLost, ToClient
from bough.messages.requests import Shutdown
from bough.observability.request_meter import RequestMeter
from bough.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
LOOK_S = 0.02  # between two looks at whose turn it is


@contextlib.asynccontextmanager
async def take_turn(folder: Path) -> AsyncIterator[None]:
    """One caller of all processes at a time, for those with the same folder."""
    with open(folder / "turn", "wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOOK_S)
        yield


class ClientEnd:
    """Owns the sockets and the client on them. Everything but `die` and `lose` is called on its loop. `addresses` are
    those of each replica. An engine's clients differ by their `number`. What other hosts connect to has `listeners`."""

    def __init__(
        self,
        addresses: Sequence[Addresses],
        number: int = 0,
        listeners: Mapping[str, int] | None = None,
        cluster_key: str = "",
    ) -> None:
        self._addresses, self._listeners, self._key = addresses, listeners or {}, cluster_key
        self.number = number
        self._context: zmq.Context[Any] = zmq.Context()
        self._schedulers: list[Sender] = []
        self._detokenizers: list[Sender] = []
        self._inbox: Receiver[ToClient] | None = None
        self._client: EngineClient | None = None
        self._death: EngineDeadError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        for replica in self._addresses:
            self._schedulers.append(Sender(self._context, replica.scheduler, key=self._key))
            if replica.detokenizer:  # another host ends its own
                self._detokenizers.append(Sender(self._context, replica.detokenizer))
        own = self._addresses[0].clients[self.number]
        # ZeroMQ closes what it is given, and its owner does so, too.
        listeners = {own: os.dup(self._listeners[own])} if own in self._listeners else None
        self._inbox = Receiver(self._context, own, ToClient, listeners=listeners, key=self._key)

    @property
    def folder(self) -> Path:
        return Path(self._addresses[0].home)

    def connect(
        self,
        tokenizer: Tokenizer | None,
        method: str,
        cache_tokens: int,
        meter: RequestMeter | None = None,
        watchers: Sequence[RequestWatcher] = (),
    ) -> EngineClient:
        """From here on messages are received. The `method` is that of placing requests."""
        assert self._loop is not None and self._inbox is not None
        replicas = Replicas(self._schedulers, method, cache_tokens)
        turn = partial(take_turn, self.folder) if len(self._addresses) > 1 else contextlib.nullcontext
        self._client = EngineClient(replicas, tokenizer, self.number, meter=meter, watchers=watchers, turn=turn)
        if self._death is not None:
            self._client.die(self._death)
        # Not zmq's own asyncio sockets: their futures cost more than all else that is done for a token here.
        self._loop.add_reader(self._inbox.fd, self._receive)
        self._loop.call_soon(self._receive)  # for what came before somebody looked
        return self._client

    def die(self, error: EngineDeadError) -> None:
        """The engine has ended. Called by the supervisor's thread."""

        def tell() -> None:
            self._death = error
            if self._client is not None:
                self._client.die(error)

        self._on_loop(tell)

    def lose(self, dp_rank: int, error: EngineDeadError) -> None:
        """A replica has died. Called by the supervisor's thread of the main process, which tells all clients."""

        def tell() -> None:
            clients = Sender(self._context, *self._addresses[0].clients, key=self._key)
            clients.send(ReplicaLost(dp_rank, str(error)))
            clients.close()

        self._on_loop(tell)

    def _on_loop(self, act: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self._loop.call_soon_threadsafe(act)

    def send_shutdown(self) -> None:
        """Ends the engine's processes; waiting callers get an error."""
        for sender in (*self._schedulers, *self._detokenizers):
            sender.send(Shutdown())
        if self._client is not None:
            self._client.die(EngineDeadError("This engine was shut down."))

    def close(self) -> None:
        if self._inbox is not None and self._loop is not None:
            self._loop.remove_reader(self._inbox.fd)
            self._inbox.close()
            self._inbox = None
        for sender in (*self._schedulers, *self._detokenizers):
            sender.close()

    def terminate(self) -> None:
        """Waits until all messages are sent; after `close`, on any thread."""
        self._context.term()

    def _receive(self) -> None:
        """Reads everything that has arrived: the descriptor signals a message only once."""
        if self._inbox is not None and self._client is not None:
            for message in self._inbox.receive():
                self._client.receive(message)


class Link:
    def __init__(self, addresses: Sequence[Addresses], **of_hosts: Any) -> None:
        self.end = ClientEnd(addresses, **of_hosts)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="bough-client")

    def open(self) -> None:
        self._thread.start()
        self._do(self.end.open)

    def connect(self, tokenizer: Tokenizer | None, method: str, cache_tokens: int) -> EngineClient:
        return self._do(lambda: self.end.connect(tokenizer, method, cache_tokens))

    def runs_here(self) -> bool:
        """Whether the caller is on the link's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def send_shutdown(self) -> None:
        if self._thread.is_alive():
            self._do(self.end.send_shutdown)

    def close(self) -> None:
        if self._thread.is_alive():
            self._do(self.end.close)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
        self.end.terminate()

    def _do(self, work: Callable[[], T]) -> T:

        async def call() -> T:
            return work()

        future: Future[T] = asyncio.run_coroutine_threadsafe(call(), self.loop)
        return future.result()

"""A client end on an event loop in a thread of its own, for callers that have no loop or another one.

Owns that thread and its loop. Closing one that is not, or only half, open is fine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from bough.client.handle import EngineClient
from bough.core.errors import EngineDeadError
from bough.launch.client_end import ClientEnd
from bough.messages.channels import Addresses
from bough.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


class Link:
    """Connects one caller's process with one engine."""

    def __init__(self, addresses: Addresses) -> None:
        self._end = ClientEnd(addresses)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="bough-client")
        self.is_open = False

    def open(self) -> None:
        self._thread.start()
        self._do(self._end.open)
        self.is_open = True

    def connect(self, tokenizer: Tokenizer | None) -> EngineClient:
        return self._do(lambda: self._end.connect(tokenizer))

    def runs_here(self) -> bool:
        """Whether the caller is on the link's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def die(self, error: EngineDeadError) -> None:
        """Called by the supervisor's thread."""
        self._end.die(error)

    def say_goodbye(self) -> None:
        if self._thread.is_alive():
            self._do(self._end.say_goodbye)

    def close(self) -> None:
        if self._thread.is_alive():
            self._do(self._end.close)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
        self._end.terminate()

    def _do(self, work: Callable[[], T]) -> T:
        """Calls `work` on the link's loop and waits for it."""

        async def call() -> T:
            return work()

        future: Future[T] = asyncio.run_coroutine_threadsafe(call(), self.loop)
        return future.result()

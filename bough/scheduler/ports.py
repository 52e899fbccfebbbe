"""What the scheduler needs of the world, as narrow protocols: tests implement them with fakes."""

from __future__ import annotations

from typing import Protocol

from bough.core.plan import Executor, InFlight
from bough.memory.tree import KVEvent
from bough.messages.outputs import Open, Reply, StepOutput
from bough.messages.requests import Ping, StartProfile, ToScheduler

__all__ = ["CacheEvents", "Executor", "InFlight", "Inbox", "Outbox", "Profiler"]


class Inbox(Protocol):
    """Where requests and commands arrive."""

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        """Everything that has arrived; waits up to `timeout_s` (None: for ever) for a first message."""
        ...


class Outbox(Protocol):
    """Where answers go: tokens to the detokenizer, replies to the client."""

    def tokens(self, message: Open | StepOutput | Ping) -> None: ...

    def reply(self, message: Reply) -> None: ...


class CacheEvents(Protocol):
    """Where news of the prefix cache go."""

    def add(self, event: KVEvent) -> None: ...

    def flush(self) -> None:
        """A turn of the loop is over: what was added belongs together."""
        ...


class Profiler(Protocol):
    """Records what the process does."""

    def start(self, wanted: StartProfile) -> None:
        """Raises a `RequestError` for what it cannot record."""
        ...

    def stop(self) -> str:
        """Writes the recording; the path of its file."""
        ...

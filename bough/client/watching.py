"""The seam for those who want to know of every request of a client: logs and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bough.client.answer import Answer


class RequestWatcher(Protocol):
    """Called in the context of the request: what the log or a trace knows of it holds."""

    def arrived(self, answer: Answer) -> None:
        """It was sent to the engine."""
        ...

    def ended(self, answer: Answer) -> None:
        """Its caller has all of it, or has left (then it is not `done`)."""
        ...

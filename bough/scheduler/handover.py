"""The seam for prompts and answers on different engines. This is the engine that does both: nobody waits here.

The sides of a pair (`bough.disaggregation`) override it. A request waits here before its grammar's gate; it goes on
when the other engine has done its part, or ends with what that has failed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from bough.constrained.interface import Ticket
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.messages.requests import Generate
from bough.scheduler.assembly import PlannedStep
from bough.scheduler.request import Request
from bough.scheduler.running_batch import RunningBatch


class Handover:
    busy = False  # copies are under way: it wants to be asked soon

    def __init__(self) -> None:
        self._waiting: dict[Request, Ticket | None] = {}
        self.counts: dict[str, int] = {}  # for the metrics

    def attach(self, batch: RunningBatch, facts: Mapping[str, str], drop: Callable[[Request], None]) -> None:
        """`facts` are the engine's, at any moment; `drop` frees a request whose caller has had its last word."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def check(self, message: Generate) -> None:
        """Raises a `RequestError` for what this engine cannot do."""
        if message.bootstrap is not None:
            raise RequestError(
                "bootstrap_host, bootstrap_port and bootstrap_room are for engines with --disaggregation-mode; leave "
                "them out.",
                field="bootstrap_room",
            )

    def enter(self, request: Request, message: Generate, ticket: Ticket | None) -> bool:
        """Whether the request waits here; with it waits the `ticket` of its grammar."""
        return False

    def leave(self, request: Request) -> None:
        """The request has ended meanwhile."""
        ticket = self._waiting.pop(request)
        if ticket is not None:
            ticket.cancel()

    def passed(self) -> list[tuple[Request, Ticket | None, FinishAbort | None]]:
        """Requests that go on, and those that end, with the reason; those may wait, or run."""
        return []

    def launched(self, step: PlannedStep) -> None:
        """Called between the launch of a step and that of the next."""

    def close(self) -> None:
        """The engine ends."""

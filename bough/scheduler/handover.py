"""The seam for prompts and answers on different engines. This is the engine that does both: nobody waits here.

The sides of a pair (`bough.disaggregation`) override it. A request waits here, with the ticket of its grammar, before
the grammar's gate: until the other engine has done its part.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bough.constrained.interface import Ticket
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.messages.requests import ChangeStorage, Generate
from bough.scheduler.assembly import PlannedStep
from bough.scheduler.request import Request
from bough.scheduler.running_batch import RunningBatch
from bough.scheduler.waiting_queue import WaitingQueue

Passing = tuple[Request, Ticket | None, FinishAbort | None]


class Handover(dict[Request, Ticket | None]):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Any] = {"transfers": 0, "transferred_bytes": 0, "failed_transfers": 0}

    def attach(
        self, batch: RunningBatch, queue: WaitingQueue, facts: Mapping[str, str], drop: Callable[[Request], None], /
    ) -> None:
        """`facts` are the engine's, at any moment; `drop` frees a request whose caller has had its last word."""
        self._batch, self._queue, self._facts, self._drop = batch, queue, facts, drop

    @property
    def busy(self) -> bool:
        """Copies are under way: it wants to be asked soon."""
        return False

    def check(self, message: Generate) -> None:
        """Raises a `RequestError` for what this engine cannot do."""
        if message.bootstrap is not None:
            text = "bootstrap_host and bootstrap_room are for engines with --disaggregation-mode; leave them out."
            raise RequestError(text, field="bootstrap_room")

    def enter(self, request: Request, message: Generate, ticket: Ticket | None) -> bool:
        """Whether the request waits here."""
        return False

    def leave(self, request: Request) -> None:
        """The request has ended meanwhile."""
        ticket = self.pop(request)
        if ticket is not None:
            ticket.cancel()

    def passed(self) -> list[Passing]:
        """Requests that go on, and those that end, with the reason; those may wait, or run."""
        return []

    def launched(self, step: PlannedStep) -> None:
        """Called between the launch of a step and that of the next."""

    def weights_changed(self) -> None:
        """What is computed from now on differs."""

    def change_storage(self, message: ChangeStorage) -> tuple[bool, str] | None:
        """Of the store below the host's memory (`bough.storage`): whether it is done, and what to tell. None: later."""
        text = "This engine can have no store. Start it with --enable-hierarchical-cache and without --pp-size"
        return False, f"{text}; with --tp-size, start it with --hicache-storage-backend."

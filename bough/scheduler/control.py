"""Commands of clients for the executor, one at a time and in order with the requests.

Owns the command under way and the messages that arrived behind it. A command begins when the requests before it have
ended, so each request is computed on one side of it; those behind it are taken in when it is done.
"""

from __future__ import annotations

from collections import deque

from bough.core.control import CommandResult, Ticket
from bough.core.errors import RequestError
from bough.core.plan import Executor
from bough.messages.requests import Abort, Control, Generate, Resume, StartProfile, StopProfile, ToScheduler

Ordered = Generate | Resume | Control | StartProfile | StopProfile  # what must not overtake a command


class ControlQueue:
    """The loop decides when the command may begin (`start`) and asks for its end (`finish`)."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.message: Control | None = None  # the command that waits or runs
        self._ticket: Ticket | None = None
        self._held: deque[Ordered] = deque()
        self._obstacle = ""
        self.facts: dict[str, str] = {}  # what commands have changed of the engine's description

    def __len__(self) -> int:
        """Requests that wait behind the command."""
        return sum(isinstance(message, Generate) for message in self._held)

    @property
    def running(self) -> bool:
        return self._ticket is not None

    def hold(self, message: ToScheduler) -> bool:
        """Keeps a message that arrived behind a command; False: it need not wait."""
        if self.message is None or not isinstance(message, Ordered):
            return False
        self._held.append(message)
        return True

    def check(self) -> None:
        """Raises while the executor cannot run plans."""
        if self._obstacle:
            raise RequestError(self._obstacle, status_code=503, err_type="ServiceUnavailableError")

    def drop(self, abort: Abort) -> list[Generate]:
        """The requests behind the command that an abort means; they wait no longer."""
        meant = [m for m in self._held if isinstance(m, Generate) and _means(abort, m)]
        self._held = deque(m for m in self._held if m not in meant)
        return meant

    def start(self) -> None:
        assert self.message is not None
        self._ticket = self._executor.control(self.message.command)

    def finish(self) -> CommandResult | None:
        """What the command has led to; None while it runs. Raises what it has failed with."""
        if self._ticket is None or not self._ticket.ready():
            return None
        ticket, self._ticket = self._ticket, None
        done = ticket.wait()
        assert self.message is not None
        self._obstacle = done.obstacle
        self.facts |= self.message.facts
        return done

    def close(self) -> deque[Ordered]:
        """The command is over: what waited behind it."""
        self.message = None
        held, self._held = self._held, deque()
        return held


def _means(abort: Abort, request: Generate) -> bool:
    if abort.handle is not None:
        return abort.handle == request.handle
    return abort.name is None or abort.name in (request.rid, *request.names)

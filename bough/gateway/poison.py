"""Whose fault it is when a request fails: the worker's, until a second worker fails at it in the same way.

A request that gets the same 5xx from two workers, or that two workers end with, is poison: it is not tried on a third,
and no breaker counts it. Where several requests were on both workers that ended, only a third end tells which it was.
"""

import msgspec

from bough.gateway.worker import Lease, Moved, Worker

UNAVAILABLE = 503  # says that the worker cannot serve any request


class Faults(msgspec.Struct, eq=False, weakref=True):
    """The failed attempts of one request."""

    poison: str | None = None  # why the request is to blame
    _undecided: dict[int, Lease] = {}  # by the status that the worker answered
    _lacking: frozenset[str] = frozenset()  # workers that do not do what it asks for
    _ended: frozenset[str] = frozenset()
    _among: Moved | None = None  # the requests that came to the worker as this one did

    def sent(self, worker: Worker) -> None:
        """The worker gets the request."""
        self._among = None
        if self._ended:
            if worker.moved.ended:
                worker.moved = Moved()
            self._among = worker.moved
            self._among.requests.add(self)

    def answered(self, lease: Lease, status: int, reason: str) -> None:
        """A worker has answered with an error of its own."""
        if status < 500 or status == UNAVAILABLE:
            lease.fail(reason)
            return
        lease.fail_undecided(reason)
        before = self._undecided.pop(status, None)
        if before is not None and before.worker is lease.worker:
            before.blame()
            before = None
        self._undecided[status] = lease
        if before is not None or self.poison is not None:
            self.poison = self.poison or f"two workers answered {status} to it"
            for each in (*self._undecided.values(), *([before] if before is not None else ())):
                each.acquit()
            self._undecided.clear()

    def lacked(self, worker: Worker) -> None:
        """A worker has answered 501, which no breaker counts in any case."""
        self._lacking |= {worker.id}
        if len(self._lacking) > 1:
            self.poison = "two workers answered 501 to it"

    def ended(self, worker: Worker) -> None:
        """The worker, or its engine, has ended while it had the request."""
        self._ended |= {worker.id}
        among, self._among = self._among, None
        if among is not None:
            among.ended = True
        if len(self._ended) > 2 or (len(self._ended) == 2 and (among is None or len(among.requests) == 1)):
            self.poison = "two workers ended while they had it"

    def progressed(self) -> None:
        """The request got further than on the workers before, so it was not what ended those."""
        self._ended = frozenset()

    def settle(self) -> None:
        """No further worker is asked, or one has answered: those that failed are to blame."""
        while self._undecided:
            self._undecided.popitem()[1].blame()

"""What a scheduler did lately: its last steps and the stages of its last requests, which the page shows.

A step costs a few readings of the clock and one tuple, a request one tuple for each stage; the rest is worked out when
somebody looks. Times are readings of the monotonic clock, which all processes of a machine share.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

STEPS, REQUESTS = 1024, 256  # that are kept

Span = tuple[float, float]  # from..to
Kept = tuple[frozenset[str], dict[str, Any]]  # a request's names, and what it has been through
Stage = tuple[str, float, int]  # what has ended, when, and the tokens that it was about
Times = tuple[float, float, float]  # when planning, launching and its end came; or waiting, committing and its end
Step = tuple[int, float, float, float, float, float, float, Span | None, int, int]


class Timeline:
    def __init__(self) -> None:
        self._launched: deque[Times] = deque()  # of the steps in flight
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._requests: deque[Kept] = deque(maxlen=REQUESTS)

    def phase(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """The `with` block is a phase; phases may nest. They are not kept here."""
        return nullcontext()

    def launched(self, times: Times) -> None:
        self._launched.append(times)

    def committed(self, step: int, times: Times, span: Span | None, work: tuple[int, int]) -> None:
        """The oldest step in flight; `work` are its decodes and its prompt tokens."""
        self._steps.append((step, *self._launched.popleft(), *times, span, *work))

    def ended(self, names: frozenset[str], record: dict[str, Any]) -> None:
        """A request whose caller alone should know its names."""
        self._requests.append((names, record))

    def show(self, live: Iterable[Kept], since: float, now: float, name: str) -> dict[str, Any]:
        """What has ended after `since`, and what has not; `found` is the request with this name."""
        steps = takewhile(lambda step: step[6] > since, reversed(self._steps))
        running = list(live)[-REQUESTS:]
        recent = takewhile(lambda kept: kept[1]["stages"][-1][1] > since, reversed(self._requests))
        found = (record["id"] for names, record in (*running, *reversed(self._requests)) if name in names)
        return {
            "now": now,
            "steps": list(steps)[::-1],
            "requests": [record for _, record in (*recent, *running)],
            "found": next(found, None),
        }

"""What an engine did lately: its last steps and the stages of its last requests, which the page shows as timelines.

A step costs a few readings of the clock and one tuple, a request one tuple for each of its stages. Everything else is
worked out when somebody looks. Times are readings of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, NamedTuple

STEPS, REQUESTS = 1024, 256  # that are kept

Span = tuple[float, float]  # from..to
Stage = tuple[str, float, int]  # what has ended, when, and the tokens that it was about


class RequestRecord(NamedTuple):
    """Each stage begins where the one before it ends, the first at `arrived`."""

    id: int
    arrived: float
    prompt: int  # tokens
    cached: int  # of those
    output: int
    stages: tuple[Stage, ...]
    ended: bool
    names: frozenset[str]  # which its caller alone should know

    def shown(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if name != "names"}


class StepRecord(NamedTuple):
    step: int
    plan: float  # when planning began, and so on
    launch: float
    launched: float
    wait: float
    commit: float
    committed: float
    device: Span | None  # None: the executor does not know
    decodes: int
    prompt_tokens: int


class History:
    def __init__(self) -> None:
        self._launched: deque[tuple[float, float, float]] = deque()  # of the steps in flight
        self._steps: deque[StepRecord] = deque(maxlen=STEPS)
        self._requests: deque[RequestRecord] = deque(maxlen=REQUESTS)

    def launched(self, plan: float, launch: float, launched: float) -> None:
        self._launched.append((plan, launch, launched))

    def committed(self, step: int, times: tuple[float, float, float], span: Span | None, *work: int) -> None:
        """The oldest step in flight has been waited for and committed; `work` are its decodes and prompt tokens."""
        self._steps.append(StepRecord(step, *self._launched.popleft(), *times, span, *work))

    def ended(self, record: RequestRecord) -> None:
        self._requests.append(record)

    def show(self, live: Iterable[RequestRecord], since: float, now: float, name: str) -> dict[str, Any]:
        """What has ended after `since`, and what has not; `found` is the request that its caller calls so."""
        recent = takewhile(lambda r: r.stages[-1][1] > since, reversed(self._requests))
        steps = takewhile(lambda s: s.committed > since, reversed(self._steps))
        running = list(live)
        named = (r.id for r in (*running, *reversed(self._requests)) if name in r.names)
        return {
            "now": now,
            "steps": [tuple(step) for step in steps][::-1],
            "requests": [r.shown() for r in (*recent, *running[-REQUESTS:])],
            "found": next(named, None),
        }

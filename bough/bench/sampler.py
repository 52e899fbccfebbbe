"""A sampling profiler for a process's main thread: where its CPU time goes, at less than a hundredth of its speed.

A timer that counts CPU time interrupts the interpreter; each time, the functions on the stack are counted. Time inside
C (sockets, parsers, encoders) counts for the Python function that called it. Idle time does not count at all.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import msgspec

INTERVAL_S = 0.002


class Profile(msgspec.Struct, frozen=True):
    """Samples by function: on top of the stack, and anywhere on it."""

    samples: int
    own: dict[str, int]
    total: dict[str, int]

    def top(self, count: int) -> list[tuple[str, float, float]]:
        """The functions with the largest own share: (function, own share, total share)."""
        if not self.samples:
            return []
        best = sorted(self.own.items(), key=lambda item: -item[1])[:count]
        return [(name, own / self.samples, self.total[name] / self.samples) for name, own in best]


@dataclass(slots=True)
class Sampler:
    """Counts from `start` on; `take` gives what was counted since and begins anew. For the main thread only."""

    _samples: int = 0
    _own: Counter[CodeType] = field(default_factory=Counter)
    _total: Counter[CodeType] = field(default_factory=Counter)

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._count)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def take(self) -> Profile:
        samples, own, total = self._samples, self._own, self._total
        self._samples, self._own, self._total = 0, Counter(), Counter()  # first: the next sample may come any moment
        return Profile(samples, _by_name(own), _by_name(total))

    def _count(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self._samples += 1
        self._own[frame.f_code] += 1
        seen: set[CodeType] = set()
        while frame is not None:
            seen.add(frame.f_code)
            frame = frame.f_back
        self._total.update(seen)


def _by_name(counts: Counter[CodeType]) -> dict[str, int]:
    named: Counter[str] = Counter()
    for code, count in counts.items():
        named[_name(code)] += count
    return dict(named)


def _name(code: CodeType) -> str:
    """Such as `bough/server/sse.py:EventStream._pump`; the last folders of a file tell enough."""
    return f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_qualname}"

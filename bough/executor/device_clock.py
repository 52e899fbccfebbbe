"""When each step was on the device, in the host's time, without ever waiting for it.

Two timed events stand around every step. They are read once the step is known to be done, which costs no wait, and
each is measured from the end of the step before: the driver gives differences in single precision, which are exact
only while they are short. A first event, waited for at start, ties the two clocks together; that a step cannot begin
before it was queued, nor end after it was seen to be done, takes out what they drift apart later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


class StepPlacement:
    """Owns the end of the last step in host time. Steps come in the order in which they ran."""

    def __init__(self, zero: float) -> None:
        self._last_end = zero

    def place(self, gap_s: float, duration_s: float, queued_at: float, seen_at: float) -> tuple[float, float]:
        """Start and end of a step that began `gap_s` after the end of the one before."""
        start = max(self._last_end + gap_s, queued_at)
        end = start + duration_s
        if end > seen_at:
            end = seen_at
            start = max(end - duration_s, self._last_end)
        self._last_end = end
        return start, end


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The events around one step."""

    clock: DeviceClock
    begun: torch.cuda.Event
    done: torch.cuda.Event
    queued_at: float

    def ready(self) -> bool:
        return bool(self.done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[float, float]:
        """Waits until the step is done; when it was on the device."""
        self.done.synchronize()
        return self.clock.read(self)


class DeviceClock:
    """Owns the event that the next step is measured from. `start` and `stop` stand around the launch of each step."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()  # the only one there is; to ask for it each time takes a while
        self._begun, self._queued_at = self._record(), time.monotonic()
        self._last_done = self._record()
        self._last_done.synchronize()
        self._placement = StepPlacement(time.monotonic())

    def start(self) -> None:
        """Comes before anything of the step is queued."""
        self._queued_at = time.monotonic()
        self._begun = self._record()

    def stop(self) -> TimedStep:
        """Comes after everything of the step is queued."""
        return TimedStep(self, self._begun, self._record(), self._queued_at)

    def read(self, step: TimedStep) -> tuple[float, float]:
        """Start and end of a step that is done, in the host's time; each step once, in order."""
        seen_at = time.monotonic()
        gap_s = 1e-3 * self._last_done.elapsed_time(step.begun)
        duration_s = 1e-3 * step.begun.elapsed_time(step.done)
        self._last_done = step.done
        return self._placement.place(gap_s, duration_s, step.queued_at, seen_at)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

"""The circuit breaker of one worker: failures in a row open it, successful trials close it. Callers pass the time."""

from enum import Enum

from bough.core.gateway_settings import GatewaySettings


class BreakerState(Enum):
    """The number is what `/metrics` shows."""

    CLOSED = 0  # all requests pass
    OPEN = 1  # none does
    HALF_OPEN = 2  # one at a time does, on trial


class Breaker:
    """Call `begin` for every request, then one of `succeeded`, `failed` and `abandoned`."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.closed = True  # as nearly always
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._successes = 0
        self._trials = 0  # only while half open
        self._last_failure_s = 0.0

    def state(self, now_s: float) -> BreakerState:
        if self._state is BreakerState.OPEN and now_s - self._last_failure_s >= self._settings.cb_timeout_duration_secs:
            return BreakerState.HALF_OPEN
        return self._state

    def admits(self, now_s: float) -> bool:
        return self.closed or (self.state(now_s) is BreakerState.HALF_OPEN and not self._trials)

    def begin(self, now_s: float) -> None:
        """A request is sent. One that was sent before the breaker opened is no trial."""
        if not self.closed and self.state(now_s) is BreakerState.HALF_OPEN:
            self._state = BreakerState.HALF_OPEN
            self._trials += 1

    def succeeded(self) -> None:
        self._failures = 0
        if not self.closed and self._state is BreakerState.HALF_OPEN:
            self.abandoned()
            self._successes += 1
            if self._successes >= self._settings.cb_success_threshold:
                self.reset()

    def proved(self) -> bool:
        """Counts a stream that works as a successful trial before it ends; returns whether it counted."""
        if self.closed or self._state is not BreakerState.HALF_OPEN:
            return False
        self.succeeded()
        return True

    def failed(self, now_s: float) -> None:
        if now_s - self._last_failure_s > self._settings.cb_window_duration_secs:
            self._failures = 0
        self._failures += 1
        self._last_failure_s = now_s
        if self._state is BreakerState.HALF_OPEN or self._failures >= self._settings.cb_failure_threshold:
            self._state, self.closed = BreakerState.OPEN, False
            self._successes = self._trials = 0

    def abandoned(self) -> None:
        """The request proved nothing about the worker: its client left, or the worker was busy."""
        self._trials = max(0, self._trials - 1)

    def reset(self) -> None:
        self._state, self.closed = BreakerState.CLOSED, True
        self._failures = self._successes = self._trials = 0

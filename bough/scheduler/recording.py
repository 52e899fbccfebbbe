"""Profiles on demand: which steps are recorded. How they are is the profiler's business.

Owns the one recording that may be under way. A recording that fails never harms the requests: its error is the reply.
"""

from __future__ import annotations

import logging

from bough.core.errors import RequestError
from bough.messages.outputs import Reply
from bough.messages.requests import StartProfile, StopProfile
from bough.scheduler.ports import Profiler

log = logging.getLogger(__name__)


class Recording:
    """Starts and stops the profiler at the steps that were asked for."""

    def __init__(self, profiler: Profiler | None) -> None:
        self._profiler = profiler
        self._wanted: StartProfile | None = None
        self._running = False
        self._steps = 0  # until it begins, then until it ends

    def obey(self, message: StartProfile | StopProfile) -> Reply:
        try:
            text = self._begin(message) if isinstance(message, StartProfile) else self._end()
        except (RequestError, OSError, RuntimeError) as error:
            return Reply(message.call, False, str(error))
        return Reply(message.call, True, text)

    def after_step(self) -> None:
        """Counts a step; begins or ends the recording where its time has come."""
        if self._wanted is None:
            return
        self._steps -= 1
        if self._steps == 0:
            reply = self.obey(StopProfile(0)) if self._running else self._start(self._wanted)
            log.info("profile: %s", reply.message)

    def close(self) -> None:
        if self._running:
            self.obey(StopProfile(0))

    def _begin(self, message: StartProfile) -> str:
        if self._profiler is None:
            raise RequestError("This engine has no profiler.")
        if self._wanted is not None:
            raise RequestError("A profile is being recorded already; stop it first (/stop_profile).")
        self._wanted = message
        if message.start_step > 0:
            self._steps = message.start_step
            return f"The profile begins in {message.start_step} steps."
        reply = self._start(message)
        if not reply.ok:
            raise RequestError(reply.message)
        return reply.message

    def _start(self, wanted: StartProfile) -> Reply:
        assert self._profiler is not None
        try:
            self._profiler.start(wanted)
        except (RequestError, OSError, RuntimeError) as error:
            self._wanted = None
            return Reply(wanted.call, False, str(error))
        self._running = True
        self._steps = wanted.num_steps or 0  # 0 is never reached by counting down: until stopped
        return Reply(wanted.call, True, "The profile is being recorded.")

    def _end(self) -> str:
        if self._wanted is None:
            raise RequestError("No profile is being recorded; start one first (/start_profile).")
        running, self._wanted, self._running = self._running, None, False
        if not running or self._profiler is None:
            return "The profile had not begun yet; nothing was written."
        return f"The profile is in {self._profiler.stop()}."

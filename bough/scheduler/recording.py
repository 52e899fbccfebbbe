"""Profiles on demand: which steps are recorded. How they are is the executor's business.

Owns the one recording that may be under way. A recording that fails never harms the requests, whatever the executor's
profiler raises: its error is the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from bough.core.control import ProfileStop
from bough.core.errors import RequestError
from bough.core.plan import Executor
from bough.messages.outputs import Reply
from bough.messages.requests import StartProfile, StopProfile

log = logging.getLogger(__name__)


class Recording:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._wanted: StartProfile | None = None
        self._running = False
        self._steps = 0  # until it begins, then until it ends

    def obey(self, message: StartProfile | StopProfile) -> Reply:
        if isinstance(message, StopProfile):
            return _reply(message.call, self._end)
        return _reply(message.call, lambda: self._begin(message))

    def after_step(self) -> None:
        """Counts a step; begins or ends the recording where its time has come."""
        if self._wanted is None:
            return
        self._steps -= 1
        if self._steps == 0:
            wanted = self._wanted
            reply = _reply(0, self._end if self._running else lambda: self._start(wanted))
            log.info("profile: %s", reply.message)

    def close(self) -> None:
        if self._running:
            self.obey(StopProfile(0))

    def _begin(self, message: StartProfile) -> str:
        if self._wanted is not None:
            raise RequestError("A profile is being recorded already; stop it first (/stop_profile).")
        if message.start_step > 0:
            self._wanted, self._steps = message, message.start_step
            return f"The profile begins in {message.start_step} steps."
        return self._start(message)

    def _start(self, wanted: StartProfile) -> str:
        self._wanted = None  # should it fail
        self._executor.control(wanted.command).wait()
        self._wanted, self._running = wanted, True
        self._steps = wanted.num_steps or 0  # 0 is never reached by counting down: until stopped
        return "The profile is being recorded."

    def _end(self) -> str:
        if self._wanted is None:
            raise RequestError("No profile is being recorded; start one first (/start_profile).")
        running, self._wanted, self._running = self._running, None, False
        if not running:
            return "The profile had not begun yet; nothing was written."
        return f"The profile is in {self._executor.control(ProfileStop()).wait().message}."


def _reply(call: int, act: Callable[[], str]) -> Reply:
    try:
        return Reply(call, True, act())
    except (RequestError, OSError) as error:
        return Reply(call, False, str(error))
    except Exception as error:
        log.exception("the profiler failed")
        return Reply(call, False, f"The profiler failed: {str(error).rstrip('.') or type(error).__name__}.")

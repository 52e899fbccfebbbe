"""Commands of clients for the executor, one at a time and in order with the requests.

Owns the command under way and the messages that arrived behind it. A command begins when the requests before it have
ended, so each request is computed on one side of it; those behind it are taken in when it is done. Profiles are
recorded while requests run: `Recording` says which steps.
"""

import logging
from collections import deque
from collections.abc import Callable

from bough.core.control import CommandResult, Decline, ProfileStop, SwapWeights, Ticket
from bough.core.errors import RequestError
from bough.core.plan import Executor
from bough.messages.outputs import WEIGHT_VERSION, Reply
from bough.messages.requests import Abort, Control, Generate, Resume, StartProfile, StopProfile, ToScheduler

log = logging.getLogger(__name__)

Ordered = Generate | Resume | Control | StartProfile | StopProfile  # what must not overtake a command


class ControlQueue:
    """The loop decides when the command may begin (`start`) and asks for its end (`finish`)."""

    def __init__(self, executor: Executor, weight_version: str = WEIGHT_VERSION) -> None:
        self._executor = executor
        self.message: Control | None = None  # the command that waits or runs
        self._ticket: Ticket | None = None
        self._held: deque[Ordered] = deque()
        self._obstacle = ""
        self.facts = {"weight_version": weight_version}  # and what commands have changed of the engine's description
        self._of_files = weight_version

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
        if self._obstacle:
            raise RequestError(self._obstacle, status_code=503, err_type="ServiceUnavailableError")

    def drop(self, abort: Abort) -> list[Generate]:
        """The requests behind the command that an abort means; they wait no longer."""
        meant = [m for m in self._held if isinstance(m, Generate) and means(abort, m)]
        self._held = deque(m for m in self._held if m not in meant)
        return meant

    def start(self, busy: int) -> None:
        """Begins the command. One that needs all pages, or cannot wait, is refused while so many requests run or wait,
        if any do."""
        assert self.message is not None
        objection = ""
        if busy and (self.message.flush_cache or not self.message.wait):
            keep = ' or, to keep what the cache has of them, give "flush_cache": false' if self.message.wait else ""
            until = "wait until they have ended or abort them (/abort_request)"
            objection = f"{busy} requests run or wait; {until}{keep}, and try again."
        if objection and not self._executor.limits().in_step:
            raise RequestError(objection)
        self._ticket = self._executor.control(Decline(objection) if objection else self.message.command)

    def finish(self) -> CommandResult | None:
        """What the command has led to; None while it runs. Raises what it has failed with."""
        if self._ticket is None or not self._ticket.ready():
            return None
        ticket, self._ticket = self._ticket, None
        done = ticket.wait()
        assert self.message is not None
        self._obstacle = done.obstacle
        self.facts |= self.message.facts
        if isinstance(self.message.command, SwapWeights):
            self._of_files = self.facts["weight_version"]
        elif done.lost:
            self.facts["weight_version"] = self._of_files
        return done

    def close(self) -> deque[Ordered]:
        """The command is over: what waited behind it."""
        self.message = None
        held, self._held = self._held, deque()
        return held


def means(abort: Abort, request: Generate) -> bool:
    if abort.handle is not None:
        return abort.handle == request.handle
    return abort.name is None or abort.name in (request.rid, *request.names)


class Recording:
    """Owns the one profile that may be under way. One that fails never harms the requests: its error is the reply."""

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

"""Attention groups in lock step: each has a scheduler that plans for itself, and step n of one is step n of all.

Whoever launches a step tells the others its number. A group that has nothing to run then launches empty steps up to
that number, so nobody polls, and nobody waits in an exchange for a group that does not come. A group that runs requests
gets time to plan first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bough.core.control import Command, GroupCommand, MeetGroups, Ticket
from bough.core.plan import BatchPlan, Executor, InFlight, Limits, StepResult, TokenMasks
from bough.executor.plain_plans import decode_plan
from bough.messages.requests import JoinStep, ToScheduler


@dataclass(frozen=True, slots=True)
class CountedStep:
    own: InFlight
    done: Callable[[], None]

    def ready(self) -> bool:
        return self.own.ready()

    def wait(self) -> StepResult:
        result = self.own.wait()
        self.done()
        return result


class LockstepExecutor:
    """The executor of one group. `tell` reaches the schedulers of the others; `turns_taken` counts what the groups have
    done together: steps, and the waiting for each other before a command."""

    def __init__(self, own: Executor, turns_taken: Callable[[], int], tell: Callable[[JoinStep], None]) -> None:
        self._own, self._turns_taken, self._tell = own, turns_taken, tell
        self._launched = turns_taken()
        self._running = 0  # steps of the scheduler that it has not looked at yet
        self._resting = False  # there were none at the last look, and none was launched since
        self._joined: deque[InFlight] = deque()  # empty steps
        self._command: Ticket | None = None

    def limits(self) -> Limits:
        return self._own.limits()

    def launch(self, plan: BatchPlan) -> InFlight:
        self._count_turns()
        self._launched += 1
        self._running, self._resting = self._running + 1, False
        self._tell(JoinStep(self._launched))
        return CountedStep(self._own.launch(plan), self._done)

    def _done(self) -> None:
        self._running -= 1

    def join(self, number: int) -> None:
        """Between two looks of the scheduler at its messages: launches empty steps up to this number if it has launched
        nothing since the last one, and had nothing in flight."""
        while self._joined and self._joined[0].ready():
            self._joined.popleft().wait()
        self._count_turns()
        while self._resting and self._command is None and self._launched < number:
            self._launched += 1
            self._joined.append(self._own.launch(decode_plan(-1, 0, len(self.limits().pages))))
        self._resting = not self._running

    def _count_turns(self) -> None:
        """A command may have taken part in steps while it waited for the other groups."""
        if self._command is not None and self._command.ready():
            self._launched, self._command = self._turns_taken(), None

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        self._own.supply_masks(step, masks)

    def control(self, command: Command) -> Ticket:
        ticket = self._own.control(command)
        if isinstance(command, GroupCommand):
            self._command = ticket
        return ticket

    def idle(self) -> bool:
        """What is put off to quiet moments would have to be done by all groups at the same time."""
        return False

    def close(self) -> None:
        self.control(MeetGroups()).wait()
        self._own.close()


class LockstepInbox:
    """The messages of a scheduler, less those of other groups."""

    def __init__(self, receive: Callable[[float | None], list[ToScheduler | JoinStep]], executor: LockstepExecutor):
        self._receive, self._executor = receive, executor
        self._number = 0

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        self._executor.join(self._number)
        messages: list[ToScheduler] = []
        for message in self._receive(timeout_s):
            if isinstance(message, JoinStep):
                self._number = max(self._number, message.number)
            else:
                messages.append(message)
        return messages

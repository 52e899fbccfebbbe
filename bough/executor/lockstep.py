"""Attention groups in lock step: each has a scheduler that plans for itself, and step n of one is step n of all.

The group that launches a step tells the others its number. A group that has nothing to run then launches empty steps
up to that number, so nobody polls, and nobody waits in an exchange for a group that does not come.
"""

from collections import deque
from collections.abc import Callable

from bough.core.control import Command, GroupCommand, MeetGroups, Ticket
from bough.core.plan import BatchPlan, Executor, InFlight, Limits, TokenMasks
from bough.distributed.group import RankGroup
from bough.executor.plain_plans import decode_plan
from bough.executor.ranks import LOOK_IN_S
from bough.messages.requests import JoinStep, ToScheduler

LOOKS = 3  # at its messages that a scheduler has after a launch before it counts as one without work


class LockstepExecutor:
    """The executor of one group. `tell` reaches the schedulers of the others."""

    def __init__(self, own: Executor, group: RankGroup, tell: Callable[[JoinStep], None]) -> None:
        self._own, self._group, self._tell = own, group, tell
        self._launched = group.turns_taken
        self._looks = 0  # since the last launch
        self._planned: InFlight | None = None  # the last step of the scheduler
        self._empty: deque[InFlight] = deque()
        self._command: Ticket | None = None

    def limits(self) -> Limits:
        return self._own.limits()

    def launch(self, plan: BatchPlan) -> InFlight:
        self._count_turns()
        self._launched, self._looks = self._launched + 1, 0
        self._tell(JoinStep(self._launched))
        self._planned = self._own.launch(plan)
        return self._planned

    def join(self, number: int) -> float | None:
        """Before the scheduler looks at its messages: launches empty steps up to this number if it has nothing to run.
        How many seconds it may wait for messages then; None: for ever."""
        while self._empty and self._empty[0].ready():
            self._empty.popleft().wait()
        self._count_turns()
        self._looks += 1
        behind = self._command is None and self._launched < number
        if behind and (self._planned is None or self._planned.ready()):
            if self._looks < LOOKS:
                return 0.0
            while self._launched < number:
                self._launched += 1
                self._empty.append(self._own.launch(decode_plan(-1, 0, len(self.limits().pages))))
        return LOOK_IN_S if self._empty else None

    def _count_turns(self) -> None:
        """A command may have taken part in steps while it waited for the other groups."""
        if self._command is not None and self._command.ready():
            self._launched, self._command = self._group.turns_taken, None

    def drafted(self, step: int) -> BatchPlan:
        return self._own.drafted(step)

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        self._own.supply_masks(step, masks)

    def control(self, command: Command) -> Ticket:
        ticket = self._own.control(command)
        if isinstance(command, GroupCommand):
            self._command = ticket
        return ticket

    def idle(self, busy: bool = False) -> bool:
        return False  # all groups would have to do what was put off at the same time

    def close(self) -> None:
        self.control(MeetGroups()).wait()
        self._own.close()


class LockstepInbox:
    """The messages of a scheduler, less those of other groups."""

    def __init__(self, receive: Callable[[float | None], list[ToScheduler | JoinStep]], executor: LockstepExecutor):
        self._receive, self._executor = receive, executor
        self._number = 0

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        most_s = self._executor.join(self._number)
        wait_s = min((each for each in (timeout_s, most_s) if each is not None), default=None)
        messages = self._receive(wait_s)
        self._number = max([self._number, *(each.number for each in messages if isinstance(each, JoinStep))])
        return [message for message in messages if not isinstance(message, JoinStep)]

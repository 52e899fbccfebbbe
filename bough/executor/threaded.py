"""Gives a synchronous executor the asynchronous face that the scheduler expects: one thread, everything in order.

Torch lets go of the interpreter's lock while it computes, so the scheduler plans and sends messages meanwhile.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from bough.core.control import Command, CommandResult
from bough.core.plan import BatchPlan, Limits, StepResult, TokenMasks

Result = TypeVar("Result")


class StepMasks:
    """Those of a plan's masked rows. A call waits for them: it comes last, before sampling, and only where the plan has
    such rows. An executor with a draft model says `drafted` before."""

    def __init__(self) -> None:
        self.drafted: Future[BatchPlan] = Future()
        self.supplied: Future[TokenMasks] = Future()

    def __call__(self) -> TokenMasks:
        return self.supplied.result()


class SynchronousExecutor(Protocol):
    """Runs a plan, or does a command, to its end on the calling thread."""

    def limits(self) -> Limits: ...

    def run(self, plan: BatchPlan, masks: StepMasks) -> StepResult: ...

    def control(self, command: Command) -> CommandResult: ...


@dataclass(frozen=True, slots=True)
class Running(Generic[Result]):
    """A step or a command on a thread. An error there is raised by `wait`: of a step it is a defect and ends the
    process."""

    future: Future[Result]

    def ready(self) -> bool:
        return self.future.done()

    def wait(self) -> Result:
        return self.future.result()


class ThreadedExecutor:
    """Owns the one thread on which everything runs, after `begin`."""

    def __init__(self, inner: SynchronousExecutor, begin: Callable[[], None] = lambda: None) -> None:
        self._inner = inner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor", initializer=begin)
        self._masks: dict[int, StepMasks] = {}  # that steps in flight wait for

    def limits(self) -> Limits:
        return self._inner.limits()

    def launch(self, plan: BatchPlan) -> Running[StepResult]:
        masks = StepMasks()
        if plan.masked is not None:
            self._masks[plan.step] = masks
        return Running(self._thread.submit(self._run, plan, masks))

    def drafted(self, step: int) -> BatchPlan:
        return self._masks[step].drafted.result()

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        self._masks.pop(step).supplied.set_result(masks)

    def control(self, command: Command) -> Running[CommandResult]:
        return Running(self._thread.submit(self._inner.control, command))

    def _run(self, plan: BatchPlan, masks: StepMasks) -> StepResult:
        """A plan, and when it ran: the thread is the device here."""
        began = time.monotonic()
        try:
            result = self._inner.run(plan, masks)
        except BaseException as error:
            if not masks.drafted.done():  # the scheduler may wait for it
                masks.drafted.set_exception(error)
            raise
        return replace(result, device_span=(began, time.monotonic()))

    def idle(self, busy: bool = False) -> bool:
        return False

    def close(self) -> None:
        for masks in self._masks.values():  # nobody waits for those steps any more, but the thread does
            masks.supplied.cancel()
        self._thread.shutdown(wait=True)

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


class SynchronousExecutor(Protocol):
    """Runs a plan, or does a command, to its end on the calling thread."""

    def limits(self) -> Limits: ...

    def run(self, plan: BatchPlan, masks: Callable[[], TokenMasks]) -> StepResult:
        """`masks` gives those of the plan's masked rows, and waits for them: it is to be asked last, before sampling,
        and only where the plan has masked rows."""
        ...

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
        self._masks: dict[int, Future[TokenMasks]] = {}  # that steps in flight wait for

    def limits(self) -> Limits:
        return self._inner.limits()

    def launch(self, plan: BatchPlan) -> Running[StepResult]:
        masks: Future[TokenMasks] = Future()
        if plan.masked is not None:
            self._masks[plan.step] = masks
        return Running(self._thread.submit(self._run, plan, masks))

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        self._masks.pop(step).set_result(masks)

    def control(self, command: Command) -> Running[CommandResult]:
        return Running(self._thread.submit(self._inner.control, command))

    def _run(self, plan: BatchPlan, masks: Future[TokenMasks]) -> StepResult:
        """A plan, and when it ran: the thread is the device here."""
        began = time.monotonic()
        result = self._inner.run(plan, masks.result)
        return replace(result, device_span=(began, time.monotonic()))

    def idle(self, busy: bool = False) -> bool:
        return False

    def close(self) -> None:
        for masks in self._masks.values():  # nobody waits for those steps any more, but the thread does
            masks.cancel()
        self._thread.shutdown(wait=True)

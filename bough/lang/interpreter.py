"""Runs one state of a program: takes its expressions in order and sees that each is done.

Text and roles are written at once while the queue is empty; from the first generation on, a task on the background loop
works the queue off. Each variable has a slot. A branch begins with what its parent has written by then. Any thread or
event loop may read.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from bough.core.errors import EngineDeadError, RequestError
from bough.lang.backends.base import Usage
from bough.lang.chat import Document
from bough.lang.expressions import Expr, Gen, ScopeEnd, Select, items_of
from bough.lang.loop import background_loop
from bough.lang.slots import Changes, Failure, Site, Slot, calling_site
from bough.lang.steps import RunOptions, Settle, Step
from bough.lang.writer import Writer

REASONING_SUFFIX = "_reasoning_content"


class Executor:
    def __init__(self, options: RunOptions, *, branch: bool = False) -> None:
        """A branch waits until its parent has come to the place where it begins."""
        self.options = options
        self.slots: dict[str, Slot] = {}
        self.children: list[Executor] = []
        self.changes = Changes()
        self.failure: Failure | None = None
        self.ended = False
        self._failure_expected = False  # somebody answers for its failure, whenever it comes
        self._writer = Writer(options, Document(options.backend.chat_format), self.changes)
        self._lock = threading.RLock()
        self._queue: deque[Step] = deque()
        self._busy = branch  # the queue is being worked off, or waits for the parent
        self._task: asyncio.Task[None] | None = None
        self._doing: Step | None = None
        self._promised: list[Slot] = []  # those that this state will fill, and not its parent

    # Writing ----------------------------------------------------------------------------------------------------------

    def submit(self, value: object) -> None:
        """Queues an expression. A state that has failed takes no more; who reads from it is told why."""
        site = calling_site()
        for expr in items_of(value):
            self._submit(self._step(expr, site))
        if not self.options.use_thread:
            self.sync()

    def fork(self, count: int) -> list[Executor]:
        children = [Executor(self.options, branch=True) for _ in range(count)]
        for child in children:
            child.slots = dict(self.slots)
        self.children += children
        self._submit(Step(ForkPoint(children), calling_site()))
        return children

    def set_variable(self, name: str, value: Any) -> None:
        self.slots[name] = slot = Slot()
        slot.fill(value)
        self.changes.notify()

    def end(self) -> None:
        self.ended = True
        for child in self.children:
            child.end()
        self.changes.notify()

    def settle_branches(self) -> None:
        """Waits for branches that nobody has waited for: no request outlives its program. Those of a state that has
        failed are given up; a failure of the others that nobody was told of is this state's own."""
        for child in self.children:
            if self.failure is not None:
                child._give_up(self.failure)
            child.sync()
            child.settle_branches()
        for child in self.children:
            if child.failure is not None and not child.failure.reported:
                self.fail(child.failure)

    def expect_failure(self) -> None:
        """Somebody joins this branch, and so hears of its failure or of a sibling's before it; or gives it up."""
        with self._lock:
            self._failure_expected = True
            if self.failure is not None:
                self.failure.reported = True

    def cancel(self, reason: BaseException, site: Site | None = None, otherwise: Site | None = None) -> None:
        """Gives up, here and in all branches: what runs is aborted, who waits gets an error with this reason and,
        if none is given, with the line of what it waits for, or `otherwise`."""
        self.expect_failure()
        self._fail_at(site or self._waits_at() or otherwise, reason)
        self._abort()
        for child in self.children:
            child.cancel(reason, site, otherwise)

    def _waits_at(self) -> Site | None:
        with self._lock:
            step = self._doing or (self._queue[0] if self._queue else None)
        if step is not None and step.site is not None:
            return step.site
        return next((site for child in self.children if (site := child._waits_at()) is not None), None)

    def _give_up(self, failure: Failure) -> None:
        self.fail(failure)
        self._abort()
        for child in self.children:
            child._give_up(failure)

    def _abort(self) -> None:
        task = self._task
        if task is not None:
            background_loop().call_soon_threadsafe(task.cancel)

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def document(self) -> Document:
        return self._writer.document

    @property
    def own_text(self) -> str:
        """What a branch has added to its parent's text."""
        return self.document.text[self._writer.start :]

    @property
    def finished(self) -> bool:
        """All of it has been done, in branches too: there is nothing to cancel."""
        return self.ended and not self._busy and all(child.finished for child in self.children)

    def over(self, *, outside: bool) -> bool:
        """Nothing more will come. Inside of the program nobody can wait for its end."""
        return self.failure is not None or (not self._busy and (self.ended or not outside))

    def until(self, condition: Callable[[], bool]) -> Iterator[Future[None]]:
        """What to wait for, one change after the other, until the condition holds."""
        while True:
            version = self.changes.version  # before the look, so that no change is missed
            if condition():
                return
            yield self.changes.since(version)

    def until_idle(self, *, outside: bool = False) -> Iterator[Future[None]]:
        """The same until everything that was submitted has been done; for those outside the program, until it has
        ended."""
        if self._busy or not self.ended:
            self._settle()
        return self.until(lambda: self.over(outside=outside))

    def sync(self, *, outside: bool = False) -> None:
        for change in self.until_idle(outside=outside):
            change.result()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure.report()

    def until_declared(self, name: str) -> Iterator[Future[None]]:
        """For those outside: until the program has come to a variable's declaration, or will never come to it."""
        return self.until(lambda: name in self.slots or self.ended or self.failure is not None)

    def slot(self, name: str) -> Slot:
        slot = self.slots.get(name)
        if slot is None:
            known = ", ".join(map(repr, self.slots)) or "none"
            raise KeyError(f"Program {self.options.program!r} has no variable {name!r}; there are: {known}.")
        if not slot.filled.done():
            self._settle()
        return slot

    def usage(self) -> Usage:
        return sum((child.usage() for child in self.children), self._writer.usage)

    # The queue --------------------------------------------------------------------------------------------------------

    def _step(self, expr: Expr, site: Site | None) -> Step:
        if isinstance(expr, Gen | Select | ScopeEnd) and expr.name is not None:
            thinks = isinstance(expr, Gen) and expr.reasoning is not None
            thoughts = self._promise(expr.name + REASONING_SUFFIX) if thinks else None
            return Step(expr, site, self._promise(expr.name), thoughts)
        return Step(expr, site)

    def _promise(self, name: str) -> Slot:
        slot = self.slots[name] = Slot()
        with self._lock:
            self._promised.append(slot)
            if self.failure is not None:
                slot.fail(self.failure)
        self.changes.notify()
        return slot

    def _settle(self) -> None:
        """What is being put together is needed now."""
        if self.options.speculates:
            self._submit(Step(Settle(), None))

    def _submit(self, step: Step) -> None:
        with self._lock:
            if self.failure is not None:
                _drop(step, self.failure)
            elif self._busy:
                self._queue.append(step)
            elif not self._done_at_once(step):
                self._queue.append(step)
                self._busy = True
                background_loop().call_soon_threadsafe(self._begin)

    def _done_at_once(self, step: Step) -> bool:
        try:
            done = self._begin_branches(step) or self._writer.do_at_once(step)
        except RequestError as error:
            self._fail_at(step.site, error)
            return True
        if done:
            self.changes.notify()
        return done

    def _begin_branches(self, step: Step) -> bool:
        if not isinstance(step.expr, ForkPoint):
            return False
        for branch in step.expr.branches:
            branch._adopt(self)
        return True

    def _adopt(self, parent: Executor) -> None:
        """The parent has come to the point where this branch begins."""
        with self._lock:
            if self.failure is not None:
                return
            self._writer.go_on_from(parent._writer)
            if not self._queue:
                self._rest()
                return
        background_loop().call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self.failure is None:
            self._task = background_loop().create_task(self._work_off())

    async def _work_off(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self.failure is not None:
                    self._rest()
                    return
                step = self._doing = self._queue.popleft()
            try:
                if not self._begin_branches(step):
                    await self._writer.do(step)
            except asyncio.CancelledError:
                self._fail_at(step.site, EngineDeadError("The back end went away while it was being waited for."))
                return
            except Exception as error:  # noqa: BLE001  # whatever a back end raises ends this state, and is told
                self._fail_at(step.site, error)
                return
            self.changes.notify()

    def _rest(self) -> None:
        self._busy, self._doing = False, None
        self.changes.notify()

    def _fail_at(self, site: Site | None, error: BaseException) -> None:
        self.fail(Failure(self.options.program, site, self.document.text, error))

    def fail(self, failure: Failure) -> None:
        """Ends this state; the first failure counts."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
            queue, self._queue = self._queue, deque()
            for slot in self._promised:
                slot.fail(self.failure)
            if self._failure_expected:
                self.failure.reported = True
            self._rest()
        for step in queue:
            _drop(step, failure)


@dataclass(frozen=True, slots=True)
class ForkPoint(Expr):
    """Branches begin here, or fail with the state that would have begun them."""

    branches: list[Executor]


def _drop(step: Step, failure: Failure) -> None:
    for branch in step.expr.branches if isinstance(step.expr, ForkPoint) else ():
        branch.fail(failure)

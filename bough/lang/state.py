"""The state `s` of a program, and the branches that `s.fork(n)` gives.

Writing returns at once; reading waits, and raises a `ProgramError` if the value will never come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Self, TypeVar

from bough.core.errors import ProgramError
from bough.lang.backends.base import Usage
from bough.lang.expressions import Expr, ExprLike, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, StopTracing
from bough.lang.interpreter import Executor
from bough.lang.primitives import in_role
from bough.lang.slots import Slot


class StateBase:
    """What a running state and one that is only traced have in common: roles, scopes, and `with` around them."""

    def __init__(self) -> None:
        self.ret_value: Any = None  # what the program returned

    def _submit(self, value: object) -> None:
        raise NotImplementedError

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> Any:
        raise NotImplementedError

    def _end(self) -> None:
        """Nothing more will be added."""

    def __iadd__(self, other: ExprLike) -> Self:
        self._submit(other)
        return self

    def system(self, expr: ExprLike | None = None) -> AbstractContextManager[None]:
        """A system message: with its content, or around what a `with` block adds."""
        return self._role("system", expr)

    def user(self, expr: ExprLike | None = None) -> AbstractContextManager[None]:
        return self._role("user", expr)

    def assistant(self, expr: ExprLike | None = None) -> AbstractContextManager[None]:
        return self._role("assistant", expr)

    def _role(self, role: str, expr: ExprLike | None) -> AbstractContextManager[None]:
        if expr is None:
            return self._around(RoleBegin(role), RoleEnd(role))
        self._submit(in_role(role, expr))
        return nullcontext()

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """What the `with` block adds becomes a variable, too."""
        return self._around(ScopeBegin(name), ScopeEnd(name))

    @contextmanager
    def _around(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._submit(begin)
        try:
            yield
        except StopTracing:  # what would follow is not known
            raise
        except BaseException:
            self._submit(end)  # a program may catch what was raised inside, and go on behind the message
            raise
        else:
            self._submit(end)

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[Self]:
        """One branch: `with s.copy() as t`."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group[0]._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()


State = TypeVar("State", bound=StateBase)


class GroupBase(Generic[State]):
    def __init__(self, states: Sequence[State], parent: State) -> None:
        self.states = list(states)
        self._parent = parent

    def __getitem__(self, index: int) -> State:
        return self.states[index]

    def __setitem__(self, index: int, value: State) -> None:
        """`group[i] += …` ends with this; the state is the same one."""
        if self.states[index] is not value:
            raise TypeError("The states of a fork cannot be replaced; add to them with group[i] += …")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[State]:
        return iter(self.states)

    def __iadd__(self, other: ExprLike | Sequence[ExprLike] | Callable[[int], ExprLike]) -> Self:
        """The same for all branches, a list with one for each, or a function of the branch's number."""
        if isinstance(other, str | Expr):
            each: Sequence[ExprLike] = [other] * len(self)
        elif callable(other):
            each = [other(i) for i in range(len(self))]
        else:
            each = list(other)
        if len(each) != len(self):
            raise ValueError(f"There are {len(self)} branches, and {len(each)} expressions for them.")
        for state, expr in zip(self.states, each, strict=True):
            state._submit(expr)
        return self


class ProgramState(StateBase):
    def __init__(self, executor: Executor, *, outside: bool = False) -> None:
        """`outside`: for those who follow a stream. Their reading waits for the program, which itself cannot."""
        super().__init__()
        self._executor = executor
        self._outside = outside

    # Writing ----------------------------------------------------------------------------------------------------------

    def _submit(self, value: object) -> None:
        self._executor.submit(value)

    def set_var(self, name: str, value: Any) -> None:
        self._executor.set_variable(name, value)

    __setitem__ = set_var

    # Branches ---------------------------------------------------------------------------------------------------------

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> ProgramStateGroup:
        """So many branches that go on from here, in parallel. It costs nothing and waits for nothing; what is written
        so far is shared. `position_ids_offset` is SGLang's and has no effect."""
        if size < 1:
            raise ValueError(f"fork() makes at least one branch, got {size}.")
        return ProgramStateGroup([ProgramState(executor) for executor in self._executor.fork(size)], self)

    # Reading ----------------------------------------------------------------------------------------------------------

    def get_var(self, name: str) -> Any:
        """The variable, as soon as it is there."""
        return self._filled(name).value

    __getitem__ = get_var

    def __contains__(self, name: str) -> bool:
        return name in self._executor.slots

    def get_meta_info(self, name: str) -> Any:
        """What is known of a generated variable: tokens, finish reason, logprobs."""
        return self._filled(name).meta

    def text(self) -> str:
        self._wait()
        return self._executor.document.text

    def messages(self) -> list[dict[str, Any]]:
        self._wait()
        return list(self._executor.document.messages)

    def sync(self) -> None:
        """Waits until everything that was added has been done."""
        self._wait()

    def error(self) -> ProgramError | None:
        """Why the state failed, if it did; waits, and does not raise."""
        self._executor.sync(outside=self._outside)
        failure = self._executor.failure
        if failure is None:
            return None
        error = failure.report()
        error.state = self
        return error

    def get_usage(self) -> Usage:
        """Tokens used so far, branches included."""
        return self._executor.usage()

    def cancel(self) -> None:
        """Aborts what runs in this state and its branches; who waits gets an error."""
        if not self._executor.finished:
            self._executor.cancel(asyncio.CancelledError("the program was cancelled"))

    def _filled(self, name: str) -> Slot:
        """In a stream the program may not have come to the variable yet."""
        executor = self._executor
        for change in executor.until_declared(name) if self._outside else ():
            change.result()
        slot = executor.slot(name)
        slot.filled.result()
        slot.check()
        return slot

    def _wait(self) -> None:
        self._executor.sync(outside=self._outside)
        self._executor.raise_failure()

    # Streams ----------------------------------------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or one variable's, piece by piece as it comes (`run(stream=True)`; else in one piece)."""
        for step in self._read(var_name):
            if isinstance(step, Future):
                step.result()
            else:
                yield step[0]

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for event loops; with `return_meta_data` pairs of a piece and its meta information."""
        for step in self._read(var_name):
            if isinstance(step, Future):
                await asyncio.wrap_future(step)
            else:
                yield step if return_meta_data else step[0]

    def _read(self, name: str | None) -> Iterator[Future[None] | tuple[str, Any]]:
        """What to wait for, and what has come then: pieces with their meta information. Raises at the end if what was
        read will never be complete, or never come."""
        executor, slot = self._executor, None
        version, shown, over = -1, 0, False
        while not over:
            yield executor.changes.since(version)
            version = executor.changes.version
            over = executor.over(outside=self._outside)  # first: what comes in between is found in the next turn
            text = executor.document.text if name is None else ""
            if name is not None and (slot := slot or executor.slots.get(name)) is not None:
                over, text = slot.filled.done(), slot.partial
            if piece := text[shown:]:
                shown += len(piece)
                yield piece, None if slot is None else slot.meta
        executor.raise_failure()
        if name is not None:
            executor.slot(name)

    # For event loops --------------------------------------------------------------------------------------------------

    async def async_get_var(self, name: str) -> Any:
        executor = self._executor
        for change in executor.until_declared(name) if self._outside else ():
            await asyncio.wrap_future(change)
        slot = executor.slot(name)
        await asyncio.shield(asyncio.wrap_future(slot.filled))  # others wait for it, too
        slot.check()
        return slot.value

    async def async_sync(self) -> None:
        for change in self._executor.until_idle(outside=self._outside):
            await asyncio.wrap_future(change)
        self._executor.raise_failure()

    def _end(self) -> None:
        self._executor.end()

    def __repr__(self) -> str:
        failure = self._executor.failure
        return f"ProgramState({self._executor.document.text!r}{'' if failure is None else ', failed'})"


class ProgramStateGroup(GroupBase[ProgramState]):
    def join(self, mode: str = "gather_variable") -> None:
        """Waits for the branches. `gather_variable`: the parent gets each of their new variables as a list over the
        branches; `concate_and_append`: it goes on with their texts, one after the other."""
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"join() knows gather_variable and concate_and_append, got {mode!r}.")
        for state in self.states:
            state._executor.expect_failure()
        for state in self.states:
            state.sync()
        if mode == "gather_variable":
            self._gather()
        else:
            self._parent += "".join(state._executor.own_text for state in self.states)
        for state in self.states:
            state._executor.end()

    def _gather(self) -> None:
        parent = self._parent._executor
        known = set(parent.slots)
        names = dict.fromkeys(name for state in self.states for name in state._executor.slots if name not in known)
        for name in names:
            parent.set_variable(name, [state[name] for state in self.states if name in state])

"""The branches that `s.fork(n)` gives, written to together and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from bough.lang.expressions import Expr, ExprLike

if TYPE_CHECKING:
    from bough.lang.state import ProgramState


class ProgramStateGroup:
    """The branches of a fork."""

    def __init__(self, states: Sequence[ProgramState], parent: ProgramState) -> None:
        self.states = list(states)
        self._parent = parent

    def join(self, mode: str = "gather_variable") -> None:
        """Waits for the branches. `gather_variable`: the parent gets each of their new variables as a list over the
        branches; `concate_and_append`: it goes on with their texts, one after the other."""
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"join() knows gather_variable and concate_and_append, got {mode!r}.")
        for state in self.states:
            state._executor.heed()
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

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        """`group[i] += …` ends with this; the state is the same one."""
        if self.states[index] is not value:
            raise TypeError("The states of a fork cannot be replaced; add to them with group[i] += …")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __iadd__(self, other: ExprLike | Sequence[ExprLike] | Callable[[int], ExprLike]) -> ProgramStateGroup:
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
            state += expr
        return self

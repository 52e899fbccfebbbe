"""States that play the program's own while it is traced: they record what is added to them, and call no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from bough.lang.chat import ChatFormat
from bough.lang.document import Document
from bough.lang.expressions import (
    Expr,
    ExprLike,
    Gen,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    as_expr,
    walk,
)
from bough.lang.graph import Fork, Lane, Node
from bough.lang.placeholders import Placeholder, StopTracing, split
from bough.lang.primitives import in_role


@dataclass(slots=True)
class Start:
    """How a program begins: what is constant, and the arguments in the order in which it comes to them."""

    constant: list[Expr] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def text(self, chat_format: ChatFormat) -> str:
        """The constant beginning as the back end will see it."""
        document = Document(chat_format)
        for expr in self.constant:
            if isinstance(expr, RoleBegin):
                document.begin(expr.role, generated=expr.generated)
            elif isinstance(expr, RoleEnd):
                document.end(expr.role)
            elif isinstance(expr, Text):
                document.text += expr.value
        return document.text

    def rank(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Sorting by this puts runs with a common prefix side by side."""
        return tuple(str(arguments.get(name, "")) for name in self.arguments)


class TraceState:
    """Plays the state: records what is added to it."""

    def __init__(self, lane: Lane, names: set[str] | None = None) -> None:
        self._lane = lane
        self._names = set(names or ())
        self._values: dict[str, Any] = {}
        self.ret_value: Any = None

    def __iadd__(self, other: ExprLike) -> TraceState:
        for expr in walk(as_expr(other)):
            for part in split(expr) if isinstance(expr, Text) else (expr,):
                self._record(part)
        return self

    def _record(self, expr: Expr) -> None:
        if isinstance(expr, Gen | Select | ScopeEnd) and expr.name is not None:
            self._names.add(expr.name)
        self._lane.items.append(_node(expr))

    # The rest of a state's methods ------------------------------------------------------------------------------------

    def system(self, expr: ExprLike | None = None) -> Any:
        return self._role("system", expr)

    def user(self, expr: ExprLike | None = None) -> Any:
        return self._role("user", expr)

    def assistant(self, expr: ExprLike | None = None) -> Any:
        return self._role("assistant", expr)

    def _role(self, role: str, expr: ExprLike | None) -> Any:
        if expr is not None:
            self += in_role(role, expr)
            return self._around(None, None)
        return self._around(RoleBegin(role), RoleEnd(role))

    def var_scope(self, name: str) -> Any:
        return self._around(ScopeBegin(name), ScopeEnd(name))

    @contextmanager
    def _around(self, begin: Expr | None, end: Expr | None) -> Iterator[None]:
        if begin is not None:
            self += begin
        try:
            yield
        except StopTracing:  # what would follow is not known
            end = None
            raise
        finally:
            if end is not None:
                self += end

    def __enter__(self) -> TraceState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is behind it."""

    def set_var(self, name: str, value: Any) -> None:
        self._names.add(name)
        self._values[name] = value

    __setitem__ = set_var

    def get_var(self, name: str) -> Any:
        self._look(f"variable {name!r}")
        return self._values.get(name, Placeholder("var", name))

    __getitem__ = get_var

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def get_meta_info(self, name: str) -> Any:
        self._look(f"meta information of {name!r}")
        return Placeholder("var", f"{name} (meta)")

    def text(self) -> Any:
        self._look("text")
        return Placeholder("var", "text so far")

    def messages(self) -> Any:
        self._look("messages")
        return Placeholder("var", "messages so far")

    def sync(self) -> None:
        self._look("end of what was added")

    def error(self) -> None:
        self._look("error")

    def text_iter(self, var_name: str | None = None) -> NoReturn:
        raise StopTracing("reads a stream")

    text_async_iter = async_get_var = async_sync = get_usage = cancel = text_iter

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> TraceGroup:
        lanes = [Lane() for _ in range(size)]
        self._lane.items.append(Fork(lanes))
        return TraceGroup([self._branch(lane) for lane in lanes], self)

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[TraceState]:
        yield self.fork(1)[0]

    def _branch(self, lane: Lane) -> TraceState:
        branch = TraceState(lane, self._names)
        branch._values = dict(self._values)
        return branch

    def _look(self, what: str) -> None:
        """Somebody reads what only a run would know."""


class StartState(TraceState):
    """Stops at the first call of a model, and at whatever could lead behind one."""

    def __init__(self, start: Start) -> None:
        super().__init__(Lane())
        self._start = start

    def _record(self, expr: Expr) -> None:
        if isinstance(expr, Placeholder):
            self._start.arguments.append(expr._name.split("[")[0])
        elif not isinstance(expr, Text | RoleBegin | RoleEnd):
            raise StopTracing("calls a model")
        elif not self._start.arguments:
            self._start.constant.append(expr)

    def _look(self, what: str) -> None:
        raise StopTracing(f"reads the {what}")

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> TraceGroup:
        raise StopTracing("forks")

    def var_scope(self, name: str) -> Any:
        return self._around(None, None)


class TraceGroup:
    """Plays the group of a fork."""

    def __init__(self, states: list[TraceState], parent: TraceState) -> None:
        self.states = states
        self._parent = parent

    def join(self, mode: str = "gather_variable") -> None:
        self._parent._lane.items.append(Node("join", mode))
        self._parent._names.update(*(state._names for state in self.states))

    def __getitem__(self, index: int) -> TraceState:
        return self.states[index]

    def __setitem__(self, index: int, value: TraceState) -> None:
        """`group[i] += …` ends with this."""

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[TraceState]:
        return iter(self.states)

    def __iadd__(self, other: ExprLike | Sequence[ExprLike] | Callable[[int], ExprLike]) -> TraceGroup:
        for i, state in enumerate(self.states):
            if isinstance(other, str | Expr):
                state += other
            else:
                state += other(i) if callable(other) else other[i]
        return self


def _node(expr: Expr) -> Node:
    if isinstance(expr, Text):
        return Node("text", expr.value)
    if isinstance(expr, Placeholder):
        return Node("argument" if expr._kind == "arg" else "variable", expr._name)
    if isinstance(expr, Gen):
        details = ", ".join(f"{name}={value!r}" for name, value in expr.sampling.items())
        return Node("gen", expr.name or "", details)
    if isinstance(expr, Select):
        return Node("select", expr.name or "", " | ".join(expr.choices))
    if isinstance(expr, RoleBegin | RoleEnd):
        return Node("begin" if isinstance(expr, RoleBegin) else "end", expr.role)
    if isinstance(expr, ScopeBegin | ScopeEnd):
        return Node("scope" if isinstance(expr, ScopeBegin) else "scope end", expr.name)
    return Node(type(expr).__name__.lower(), "")

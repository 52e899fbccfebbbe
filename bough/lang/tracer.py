"""Runs programs without a model, to see what they would do.

What is not known is a placeholder. A program that looks into one (`if s["x"] == …`) is followed up to there.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from bough.core.errors import BoughError
from bough.lang import expressions as ex
from bough.lang.chat import ChatFormat, Document
from bough.lang.expressions import Expr, Placeholder, StopTracing, Text
from bough.lang.graph import Graph, Lane, Node
from bough.lang.state import GroupBase, StateBase
from bough.lang.steps import Body

MOST_LINES = 200_000  # of Python, in one trace


@dataclass(slots=True)
class Start:
    """How a program begins: what is constant, and the arguments in the order in which it comes to them."""

    constant: list[Expr] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def text(self, chat_format: ChatFormat) -> str:
        document = Document(chat_format)
        for expr in self.constant:
            if isinstance(expr, ex.RoleBegin):
                document.begin(expr.role, generated=expr.generated)
            elif isinstance(expr, ex.RoleEnd):
                document.end(expr.role)
            elif isinstance(expr, Text):
                document.text += expr.value
        return document.text

    def rank(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Sorting by this puts runs with a common prefix side by side."""
        return tuple(str(arguments.get(name, "")) for name in self.arguments)


class TraceState(StateBase):
    def __init__(self, lane: Lane, names: Collection[str] = (), values: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._lane = lane
        self._names = set(names)
        self._values = dict(values or {})

    def _submit(self, value: object) -> None:
        for expr in ex.items_of(value):
            for part in ex.split(expr) if isinstance(expr, Text) else (expr,):
                self._record(part)

    def _record(self, expr: Expr) -> None:
        if isinstance(expr, ex.Gen | ex.Select | ex.ScopeEnd) and expr.name is not None:
            self._names.add(expr.name)
        self._lane.append(_node(expr))

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
        lanes: tuple[Lane, ...] = tuple([] for _ in range(size))
        self._lane.append(lanes)
        return TraceGroup([TraceState(lane, self._names, self._values) for lane in lanes], self)

    def _look(self, what: str) -> None:
        """Somebody reads what only a run would know."""


class StartState(TraceState):
    """Stops at the first call of a model, and at whatever could lead behind one."""

    def __init__(self, start: Start) -> None:
        super().__init__([])
        self._start = start

    def _record(self, expr: Expr) -> None:
        if isinstance(expr, Placeholder):
            self._start.arguments.append(expr._name.split("[")[0])
        elif not isinstance(expr, Text | ex.RoleBegin | ex.RoleEnd):
            raise StopTracing("calls a model")
        elif not self._start.arguments:
            self._start.constant.append(expr)

    def _look(self, what: str) -> None:
        raise StopTracing(f"reads the {what}")

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> TraceGroup:
        raise StopTracing("forks")

    def var_scope(self, name: str) -> Any:
        return nullcontext()


class TraceGroup(GroupBase[TraceState]):
    def join(self, mode: str = "gather_variable") -> None:
        self._parent._lane.append(Node("join", mode))
        self._parent._names.update(*(state._names for state in self.states))


def _node(expr: Expr) -> Node:
    if isinstance(expr, Text):
        return Node("text", expr.value)
    if isinstance(expr, Placeholder):
        return Node("argument" if expr._kind == "arg" else "variable", expr._name)
    if isinstance(expr, ex.Gen):
        details = ", ".join(f"{name}={value!r}" for name, value in expr.sampling.items())
        return Node("gen", expr.name or "", details)
    if isinstance(expr, ex.Select):
        return Node("select", expr.name or "", " | ".join(expr.choices))
    if isinstance(expr, ex.RoleBegin | ex.RoleEnd):
        return Node("begin" if isinstance(expr, ex.RoleBegin) else "end", expr.role)
    if isinstance(expr, ex.ScopeBegin | ex.ScopeEnd):
        return Node("scope" if isinstance(expr, ex.ScopeBegin) else "scope end", expr.name)
    return Node(type(expr).__name__.lower(), "")


def trace_program(program: Body, given: Mapping[str, Any]) -> Graph:
    lane: Lane = []
    ended = _play(program, TraceState(lane), given)
    return Graph(program.name, [parameter.name for parameter in program.parameters], lane, ended)


def trace_start(program: Body, given: Mapping[str, Any], varied: Collection[str] = ()) -> Start:
    """How a program begins. A program whose way depends on an argument's value is followed up to there. `varied`
    arguments stay open though they have a default or are bound."""
    start = Start()
    _play(program, StartState(start), given, varied)
    start.arguments = list(dict.fromkeys([*start.arguments, *(parameter.name for parameter in program.parameters)]))
    return start


def _play(program: Body, state: TraceState, given: Mapping[str, Any], varied: Collection[str] = ()) -> str | None:
    """Runs the body; says why it could not be followed to its end, if so."""
    named = [p for p in program.parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = {p.name: Placeholder("arg", p.name) for p in named if p.default is p.empty}
    left_open = {p.name: Placeholder("arg", p.name) for p in named if p.name in varied}
    arguments = {**needed, **program.bound, **left_open, **given}
    try:
        with ex.tracing(), _limited_lines():
            program.func(state, **arguments)
    except StopTracing as stop:
        return stop.reason
    except BoughError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # the body meets placeholders that it was not written for
        shown = ex.WRITTEN.sub(r"<\2>", str(error))
        return f"{type(error).__name__}: {shown}"
    return None


@contextmanager
def _limited_lines() -> Iterator[None]:
    """Stops what goes on for too long. A debugger looks away meanwhile; it sees the real run."""
    left = MOST_LINES

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise StopTracing(f"stopped after {MOST_LINES:,} lines")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)

"""What a program is made of: text, generations, choices, media and roles, as plain values.

Nothing happens until `s += expression`. Programs make expressions by the functions of `primitives`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from bough.lang.choices import ChoicesSamplingMethod

ExprLike: TypeAlias = "str | Expr"


class Expr:
    """Anything that can be added to a state; `+` puts expressions and text in a row."""

    __slots__ = ()

    def __add__(self, other: ExprLike) -> Expr:
        return Row((*items_of(self), *items_of(other)))

    def __radd__(self, other: ExprLike) -> Expr:
        return Row((*items_of(other), *items_of(self)))


@dataclass(frozen=True, slots=True)
class Row(Expr):
    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Text(Expr):
    value: str


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    name: str | None
    sampling: Mapping[str, Any]  # what this generation sets itself, under the names of the engine's parameters
    reasoning: str | None = None  # the kind of model whose reasoning is to be kept apart
    ends: tuple[str, ...] = ()  # what ends it beside the stops that are set, here or for the run


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """The one of several texts that the model finds likeliest."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float
    method: ChoicesSamplingMethod


@dataclass(frozen=True, slots=True)
class Image(Expr):
    """A picture: a path, an address, bytes or a base64 text."""

    source: str | bytes


@dataclass(frozen=True, slots=True)
class Video(Expr):
    """Frames of a film."""

    path: str
    num_frames: int


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """A message begins. `generated`: the model writes in it, or may: then the prompt invites it to."""

    role: str
    generated: bool = True


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    name: str


def items_of(value: object) -> tuple[Expr, ...]:
    """What text or an expression adds to a state: expressions in their order, without rows."""
    if isinstance(value, Expr):
        return value.items if isinstance(value, Row) else (value,)
    if isinstance(value, str):
        return (Text(value),)
    raise TypeError(f"A state takes text and expressions such as gen(), got {type(value).__name__}: {value!r:.80}.")


# Values that tracing does not know: arguments that were not given, and what a model would write. They can be written,
# also inside f-strings, but nobody can look into them.

WRITTEN = re.compile("\x02(arg|var):(.*?)\x03")  # a placeholder inside a text

_tracing: ContextVar[bool] = ContextVar("tracing", default=False)


class StopTracing(BaseException):
    """The program's way cannot be known from here on. Not an `Exception`: programs may catch those."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def tracing() -> Iterator[None]:
    before = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(before)


def refuse_while_tracing(what: str) -> None:
    """For what would really call a model."""
    if _tracing.get():
        raise StopTracing(what)


class Placeholder(Expr):
    """A value that is not known: an argument, or what a model will have written."""

    __slots__ = ("_kind", "_name")

    def __init__(self, kind: str, name: str) -> None:
        self._kind = kind
        self._name = name

    def __str__(self) -> str:
        return f"\x02{self._kind}:{self._name}\x03"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)

    def __getitem__(self, key: object) -> Placeholder:
        return Placeholder(self._kind, f"{self._name}[{key!r}]")

    def _look_inside(self, *others: object) -> NoReturn:
        what = "argument" if self._kind == "arg" else "variable"
        raise StopTracing(f"depends on the value of {what} {self._name!r}")

    def __getattr__(self, name: str) -> NoReturn:
        self._look_inside()

    __bool__ = __len__ = __iter__ = __contains__ = __call__ = __int__ = __float__ = __index__ = _look_inside
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _look_inside
    __sub__ = __mul__ = __truediv__ = __mod__ = _look_inside


def split(text: Text) -> list[Expr]:
    """A text with placeholders in it, as its parts."""
    parts: list[Expr] = []
    at = 0
    for found in WRITTEN.finditer(text.value):
        parts += [Text(text.value[at : found.start()])] if found.start() > at else []
        parts.append(Placeholder(found[1], found[2]))
        at = found.end()
    return parts + ([Text(text.value[at:])] if at < len(text.value) else [])

"""What a program is made of: text, generations, choices, media and roles, as plain values.

Nothing happens when an expression is made; `s += expression` hands it to the state, whose executor does what it says.
Programs make them by the functions of `primitives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

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


def as_expr(value: object) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    raise TypeError(f"A state takes text and expressions such as gen(), got {type(value).__name__}: {value!r:.80}.")


def walk(expr: Expr) -> tuple[Expr, ...]:
    """The expressions in their order, without rows."""
    return expr.items if isinstance(expr, Row) else (expr,)


def items_of(value: object) -> tuple[Expr, ...]:
    return walk(as_expr(value))

"""Values that tracing does not know: arguments that were not given, and what a model would write. They can be written,
also inside f-strings, but nobody can look into them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

from bough.lang.expressions import Expr, Text

WRITTEN = re.compile("\x02(arg|var):(.*?)\x03")  # a placeholder inside a text

_tracing: ContextVar[bool] = ContextVar("tracing", default=False)


class StopTracing(BaseException):
    """The program's way cannot be known from here on. Not an `Exception`: programs may catch those."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def tracing() -> Iterator[None]:
    """What is done here is only played."""
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

"""What an executor's queue holds, what holds for all of a run, and the arguments of a program."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bough.lang.backends.base import Backend
from bough.lang.expressions import Expr
from bough.lang.slots import Site, Slot


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What holds for one run of a program: its name, its back end, and what generations take that say nothing."""

    program: str
    backend: Backend
    sampling: Mapping[str, Any]
    stream: bool = False
    use_thread: bool = True
    num_api_spec_tokens: int | None = None

    @property
    def speculates(self) -> bool:
        """An assistant's message is one call, whatever stands in it."""
        return bool(self.num_api_spec_tokens) and self.backend.chat_only


@dataclass(frozen=True, slots=True)
class Settle:
    """Somebody waits for a variable of a message that is still being put together."""


@dataclass(slots=True)
class Step:
    """One expression in the queue, the line that it came from, and the variables that it fills."""

    expr: Expr | Settle
    site: Site | None
    slot: Slot | None = None
    thoughts: Slot | None = None  # for a model's reasoning, where it is kept apart


class Body:
    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any]) -> None:
        self.func = func
        self.bound = dict(bound)
        self.name = func.__name__
        if inspect.iscoroutinefunction(func):
            raise TypeError(f"Program {self.name!r} is an async function; write it with def, and use async_run().")
        self.parameters = list(inspect.signature(func).parameters.values())[1:]  # without the state
        if not inspect.signature(func).parameters:
            raise TypeError(f"Program {self.name!r} needs a state as its first parameter: def {self.name}(s, …).")

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a run that is given these: with what is bound, and with the defaults."""
        defaults = {p.name: p.default for p in self.parameters if p.default is not p.empty}
        return {**defaults, **self.bound, **given}

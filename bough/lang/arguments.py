"""The arguments of a program: those of its function, and those that `run` and `run_batch` take beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict


class Body:
    """The function that a program runs, and those of its arguments that are bound."""

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


class SamplingArguments(TypedDict, total=False):
    """What holds for all generations of a program that say nothing themselves."""

    max_new_tokens: int
    n: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    ignore_eos: bool
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None


class BatchArguments(SamplingArguments, total=False):
    """What a batch takes, but for the way in which it gives its states."""

    backend: Any
    num_threads: int | Literal["auto"]
    progress_bar: bool
    timeout_s: float | None


SAMPLING_NAMES = tuple(SamplingArguments.__annotations__)
RUN_NAMES = (*SAMPLING_NAMES, "stream", "backend", "use_thread", "timeout_s")
BATCH_NAMES = frozenset(BatchArguments.__annotations__)

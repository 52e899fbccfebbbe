"""`@function`: a Python function that writes with a model, and the ways to run it. The body runs in a thread."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from bough.lang.config import as_backend, global_config
from bough.lang.expressions import refuse_while_tracing
from bough.lang.graph import Graph
from bough.lang.running import Batch, BatchResults, Run, checked, new_state, raise_failure
from bough.lang.state import ProgramState, StateBase
from bough.lang.steps import Body, RunOptions
from bough.lang.tracer import trace_program, trace_start


class Program(Body):
    """A function of a state `s` and arguments of its own, with the ways to run it."""

    def __init__(
        self, func: Callable[..., Any], num_api_spec_tokens: int | None = None, bound: Mapping[str, Any] | None = None
    ) -> None:
        functools.update_wrapper(self, func)  # its name, its words, its signature
        super().__init__(func, bound or {})
        self.num_api_spec_tokens = num_api_spec_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With a state it is a part of another program, `inner(s, …)`, and gives what its function returns; without one
        it is run."""
        if args and isinstance(args[0], StateBase):
            return self.func(*args, **{**self.bound, **kwargs})
        return self.run(*args, **kwargs)

    def bind(self, **kwargs: Any) -> Program:
        known = {parameter.name for parameter in self.parameters}
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters)
        unknown = [name for name in kwargs if name not in known and not takes_any]
        if unknown:
            raise TypeError(f"Program {self.name!r} has no parameter {unknown[0]!r}; it has {', '.join(known)}.")
        return Program(self.func, self.num_api_spec_tokens, {**self.bound, **kwargs})

    # Running ----------------------------------------------------------------------------------------------------------

    def run(
        self,
        *args: Any,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> ProgramState:
        """Runs the program and gives its final state; raises a `ProgramError` if it failed. With `stream=True` it
        returns at once, and the state is read while the program runs. `use_thread=False` does one thing at a time.
        After `timeout_s` everything that is being waited for is aborted; Python code of the body itself is not."""
        work = self._new_run(args, kwargs, locals())
        if stream:
            work.start_thread()
        else:
            work.complete()
            raise_failure(work.state)
        return work.state

    async def async_run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run` for event loops, with its arguments; the body runs in a thread. Cancelling it aborts the program."""
        arguments = {name: kwargs.pop(name) for name in RUN_DEFAULTS if name in kwargs}
        work = self._new_run(args, kwargs, arguments)
        done = work.start_thread()
        if not arguments.get("stream"):
            try:
                await asyncio.wrap_future(done)
            except asyncio.CancelledError as reason:
                work.state._executor.cancel(reason)
                raise
            raise_failure(work.state)
        return work.state

    def _new_run(self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[str, Any]) -> Run:
        options = self._options(given, bool(given.get("stream")), given.get("use_thread", True))
        return Run(new_state(options), self.func, args, {**self.bound, **kwargs}, given.get("timeout_s"))

    @overload
    def run_batch(
        self, batch_kwargs: Sequence[Any], *, generator_style: Literal[False] = False, **rest: Any
    ) -> BatchResults: ...
    @overload
    def run_batch(
        self, batch_kwargs: Sequence[Any], *, generator_style: Literal[True], **rest: Any
    ) -> Iterator[ProgramState]: ...
    @overload
    def run_batch(
        self, batch_kwargs: Sequence[Any], *, generator_style: bool, **rest: Any
    ) -> BatchResults | Iterator[ProgramState]: ...
    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **options: Any,
    ) -> BatchResults | Iterator[ProgramState]:
        """Runs the program for each set of arguments (a dict, or a tuple in the order of the parameters), in parallel.
        A failing one keeps the others' results: its state says why, and `errors` of the result has them by index. With
        `generator_style` the states are given one by one, in order. `options` are those of `run`."""
        batch = self._new_batch(batch_kwargs, num_threads, options)
        batch.start()
        return batch.in_turn(progress_bar) if generator_style else checked(list(batch.in_turn(progress_bar)))

    async def async_run_batch(self, batch_kwargs: Sequence[Any], **kwargs: Any) -> BatchResults:
        """`run_batch` for event loops, with its arguments. Cancelling it aborts all programs."""
        states = [state async for state in self.async_iter_batch(batch_kwargs, **kwargs)]
        return checked(states)

    async def async_iter_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> AsyncIterator[ProgramState]:
        batch = self._new_batch(batch_kwargs, num_threads, options)
        await batch.async_start()
        async for state in batch.async_in_turn(progress_bar):
            yield state

    def _new_batch(
        self, batch_kwargs: Sequence[Any], num_threads: int | Literal["auto"], given: Mapping[str, Any]
    ) -> Batch:
        unknown = given.keys() - BATCH_OPTIONS.keys()
        if unknown:
            raise TypeError(f"run_batch() has no argument {min(unknown)!r}.")
        return Batch(self, self._options(given, False, True), batch_kwargs, num_threads, given.get("timeout_s"))

    # Looking ahead ----------------------------------------------------------------------------------------------------

    def trace(self, *, backend: Any = None, **kwargs: Any) -> Graph:
        """The program's graph, found by running it without a model. Arguments that are not given stay open; where the
        program's way depends on one, or on what a model would write, the graph ends."""
        return trace_program(self, kwargs)

    def cache(self, backend: Any = None, **kwargs: Any) -> str:
        """Computes the program's constant beginning ahead of time; gives it back."""
        refuse_while_tracing(f"caches program {self.name!r}")
        chosen = as_backend(backend)
        prefix = trace_start(self, kwargs).text(chosen.chat_format)
        if prefix:
            chosen.cache_prefix(prefix)
        return prefix

    def _options(self, given: Mapping[str, Any], stream: bool, use_thread: bool) -> RunOptions:
        refuse_while_tracing(f"runs program {self.name!r}")
        named = {name: given.get(name, default) for name, default in RUN_DEFAULTS.items() if name not in RUN_OPTIONS}
        sampling = {name: value for name, value in named.items() if value is not None}
        if not global_config.skip_special_tokens_in_output:
            sampling["skip_special_tokens"] = False
        backend = as_backend(given.get("backend"))
        return RunOptions(self.name, backend, sampling, stream, use_thread, self.num_api_spec_tokens)

    def __repr__(self) -> str:
        return f"<program {self.name}({', '.join(parameter.name for parameter in self.parameters)})>"


RUN_OPTIONS = ("stream", "backend", "use_thread", "timeout_s")
_of_run = {p.name: p for p in inspect.signature(Program.run).parameters.values() if p.kind is p.KEYWORD_ONLY}
RUN_DEFAULTS = {name: p.default for name, p in _of_run.items()}  # and of all generations that say nothing themselves
BATCH_OPTIONS = {name: p for name, p in _of_run.items() if name not in ("stream", "use_thread")}
_own = [p for p in inspect.signature(Program.run_batch).parameters.values() if p.kind is not p.VAR_KEYWORD]
# What `help` and editors show: the options by name.
vars(Program.run_batch)["__signature__"] = inspect.Signature([*_own, *BATCH_OPTIONS.values()])


@overload
def function(func: Callable[..., Any]) -> Program: ...
@overload
def function(func: None = None, num_api_spec_tokens: int | None = None) -> Callable[[Callable[..., Any]], Program]: ...
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Makes a program of a function whose first parameter is the state. `num_api_spec_tokens` lets chat APIs write a
    whole message of several generations in one call of so many tokens."""
    if func is not None:
        return Program(func, num_api_spec_tokens)
    return lambda body: Program(body, num_api_spec_tokens)

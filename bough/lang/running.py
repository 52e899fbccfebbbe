"""Runs of a program: one, or many at once, whose common beginning is computed first, and once."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from bough.core.errors import ProgramError
from bough.lang import loop
from bough.lang.config import global_config
from bough.lang.interpreter import Executor
from bough.lang.slots import Site, raising_site, running_site
from bough.lang.state import ProgramState
from bough.lang.steps import Body, RunOptions
from bough.lang.tracer import trace_start

logger = logging.getLogger(__name__)
WORTH_CACHING = 64  # characters of a common beginning
FEWEST_AUTO_THREADS = 96


def new_state(options: RunOptions) -> ProgramState:
    """For whoever runs the program; of a stream it is read while the body runs."""
    return ProgramState(Executor(options), outside=options.stream)


def raise_failure(state: ProgramState) -> None:
    error = state.error()
    if error is not None:
        raise error


@dataclass(frozen=True, slots=True)
class Run:
    state: ProgramState
    _func: Callable[..., Any]
    _args: Sequence[Any]
    _kwargs: Mapping[str, Any]
    _timeout_s: float | None = None

    def complete(self) -> None:
        """In the caller's thread, to the end. What goes wrong is in the state; only an interrupt is raised."""
        executor = self.state._executor
        file = self._func.__code__.co_filename
        here = partial(running_site, threading.get_ident(), file)
        timer = None if self._timeout_s is None else loop.start(_expire(executor, self._timeout_s, here))
        inside = ProgramState(executor) if self.state._outside else self.state
        try:
            self.state.ret_value = self._func(inside, *self._args, **self._kwargs)
            executor.sync()
            executor.settle_branches()  # before the end: who follows a stream must hear of a branch that fails
        except Exception as error:  # noqa: BLE001  # the body is the user's; what it raises is told with its place
            executor.cancel(error, raising_site(error, file))
        except BaseException as error:
            executor.cancel(error)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            executor.end()
            if global_config.verbosity > 1:
                logger.info("%s wrote: %s", executor.options.program, executor.document.text)

    def start_thread(self) -> Future[None]:
        """In a thread of its own; done when the program has ended, however it did."""
        done: Future[None] = Future()

        def work() -> None:
            try:
                self.complete()
            finally:
                if not done.done():  # done: whoever waited has left
                    done.set_result(None)

        threading.Thread(target=work, daemon=True, name=f"bough-program-{self._func.__name__}").start()
        return done


async def _expire(executor: Executor, timeout_s: float, here: Callable[[], Site | None]) -> None:
    """`here` tells where the body is, for one that is busy with something else than the model."""
    await asyncio.sleep(timeout_s)
    executor.cancel(TimeoutError(f"the program took longer than {timeout_s:g} s"), otherwise=here())


class BatchResults(list[ProgramState]):
    """The states of a batch, in the order of its arguments."""

    @property
    def errors(self) -> dict[int, ProgramError]:
        found = {i: state.error() for i, state in enumerate(self)}
        return {i: error for i, error in found.items() if error is not None}


class Batch:
    def __init__(
        self,
        program: Body,
        options: RunOptions,
        items: Sequence[Any],
        num_threads: int | Literal["auto"],
        timeout_s: float | None,
    ) -> None:
        self._program = program
        self._options = options
        self._items = [program.arguments(_as_kwargs(program, item)) for item in items]
        self._order = list(range(len(self._items)))  # in which they start
        self._threads = _thread_count(num_threads, len(self._items))
        self._timeout_s = timeout_s
        self._states = [new_state(options) for _ in self._items]
        self._done: list[Future[None]] = []

    def start(self) -> None:
        prefix = self._plan()
        if prefix is not None:
            loop.wait_for(self._cache(prefix))
        self._launch()

    async def async_start(self) -> None:
        """`start` for event loops; one that is cancelled starts nothing."""
        prefix = await asyncio.to_thread(self._plan)
        if prefix is not None:
            await asyncio.wrap_future(loop.start(self._cache(prefix)))
        self._launch()

    def _plan(self) -> str | None:
        """Puts the runs in order; gives the beginning that all of them have, if it is worth caching."""
        if len(self._items) < 2 or not global_config.enable_precache_with_tracing:
            return None
        common, varied = _compare(self._items)
        start = trace_start(self._program, common, varied)
        self._order.sort(key=lambda i: start.rank(self._items[i]))
        prefix = start.text(self._options.backend.chat_format)
        return prefix if len(prefix) > WORTH_CACHING else None

    def _launch(self) -> None:
        if not self._items:
            return
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix=f"bough-batch-{self._program.name}")
        runs = [
            Run(state, self._program.func, (), item, self._timeout_s)
            for state, item in zip(self._states, self._items, strict=True)
        ]
        futures = {i: pool.submit(runs[i].complete) for i in self._order}
        self._done = [futures[i] for i in range(len(self._items))]
        pool.shutdown(wait=False)

    def in_turn(self, progress_bar: bool) -> Iterator[ProgramState]:
        """Each state when it is done; leaving early aborts the rest."""
        try:
            for state, done in self._progress(progress_bar):
                done.result()
                yield state
        finally:
            self._cancel()

    async def async_in_turn(self, progress_bar: bool) -> AsyncIterator[ProgramState]:
        try:
            for state, done in self._progress(progress_bar):
                await asyncio.wrap_future(done)
                yield state
        finally:
            self._cancel()

    def _progress(self, shown: bool) -> Iterable[tuple[ProgramState, Future[None]]]:
        pairs = list(zip(self._states, self._done, strict=True))
        if not shown:
            return pairs
        from tqdm import tqdm

        return tqdm(pairs, desc=self._program.name)

    def _cancel(self) -> None:
        for state, done in zip(self._states, self._done, strict=True):
            if not done.done():
                done.cancel()
                state.cancel()

    async def _cache(self, prefix: str) -> None:
        if global_config.verbosity:
            logger.info("%s: caching a common prefix of %d characters", self._program.name, len(prefix))
        try:
            await asyncio.wait_for(self._options.backend.async_cache_prefix(prefix), self._timeout_s)
        except Exception as error:  # noqa: BLE001  # whatever it is, each run will meet it, and says where
            reason = f"{type(error).__name__} {error}".rstrip()
            logger.warning("%s: the common prefix could not be cached: %s", self._program.name, reason)


def checked(states: list[ProgramState]) -> BatchResults:
    """The results of a batch; says in the log if some failed."""
    results = BatchResults(states)
    errors = results.errors
    if errors:
        first = min(errors)
        logger.warning("%d of %d programs failed; number %d: %s", len(errors), len(states), first, errors[first])
    return results


def _as_kwargs(program: Body, item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    values = item if isinstance(item, list | tuple) else (item,)
    names = [parameter.name for parameter in program.parameters if parameter.name not in program.bound]
    if len(values) > len(names):
        raise TypeError(f"Program {program.name!r} takes {len(names)} arguments, got {len(values)}: {item!r:.80}.")
    return dict(zip(names, values, strict=False))


def _compare(items: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    first, *others = items

    def same(a: Any, b: Any) -> bool:
        return a is b or (type(a) is type(b) and isinstance(a, str | int | float) and a == b)

    common = {name: value for name, value in first.items() if all(same(value, item.get(name)) for item in others)}
    return common, {name for item in items for name in item} - common.keys()


def _thread_count(asked: int | Literal["auto"], items: int) -> int:
    most = max(FEWEST_AUTO_THREADS, (os.cpu_count() or 1) * 16) if asked == "auto" else asked
    if most < 1:
        raise ValueError(f"num_threads must be at least 1, got {asked}.")
    return max(1, min(most, items))

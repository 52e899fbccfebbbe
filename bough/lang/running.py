"""One run of a program's body: starts it, waits for what it has begun, and says what went wrong.

Owns the thread of a run that has one, and its time-out.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from bough.lang import loop
from bough.lang.config import global_config
from bough.lang.failure import Site, raising_site, running_site
from bough.lang.interpreter import Executor
from bough.lang.state import ProgramState
from bough.lang.steps import RunOptions

logger = logging.getLogger(__name__)


def new_state(options: RunOptions) -> ProgramState:
    """For whoever runs the program; of a stream it is read while the body runs."""
    return ProgramState(Executor(options), outside=options.stream)


def raise_failure(state: ProgramState) -> None:
    """Raises why the program failed, with its state attached."""
    error = state.error()
    if error is not None:
        raise error


class Run:
    """A body with its arguments and its state."""

    def __init__(
        self,
        state: ProgramState,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float | None = None,
    ) -> None:
        self.state = state
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._timeout_s = timeout_s

    def finish(self) -> None:
        """In the caller's thread, to the end; raises if the program failed."""
        self.complete()
        raise_failure(self.state)

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

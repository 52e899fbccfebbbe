"""Runs the parts of a load in forked processes: one client process cannot keep up with a fast server.

A fork needs a process without threads, so progress bars are made after it. It also hands over what cannot be pickled.
"""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from bough.core.errors import EngineDeadError

T = TypeVar("T")
OnProgress = Callable[[int], object]  # so many requests have been answered
_task: list[Any] = []  # of a forked process: the work, and where its progress goes


def run_parts(count: int, work: Callable[[int, OnProgress], T], make_on_progress: Callable[[], OnProgress]) -> list[T]:
    """The results of `work(part, on_progress)`. `make_on_progress` is called once all have started."""
    if count == 1:
        return [work(0, make_on_progress())]
    context = multiprocessing.get_context("fork")
    answered = context.SimpleQueue()
    with ProcessPoolExecutor(count, context, _task.extend, ([work, answered.put],)) as pool:
        parts = [pool.submit(_run, part) for part in range(count)]
        on_progress = make_on_progress()
        reader = threading.Thread(target=lambda: [on_progress(more) for more in iter(answered.get, None)])
        reader.start()
        try:
            return [part.result() for part in parts]
        except BrokenProcessPool:
            raise EngineDeadError("A client process of the benchmark has died.") from None
        finally:
            answered.put(None)
            reader.join()


def _run(part: int) -> Any:
    work, on_progress = _task
    return work(part, on_progress)

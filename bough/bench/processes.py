"""Runs the parts of a load in forked processes: one client process cannot keep up with a fast server.

A fork needs a process without threads, so progress bars are made after it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

from bough.core.errors import BoughError, EngineDeadError

T = TypeVar("T")
OnProgress = Callable[[int], None]  # so many requests have been answered


def run_parts(count: int, work: Callable[[int, OnProgress], T], make_on_progress: Callable[[], OnProgress]) -> list[T]:
    """The results of `work(part, on_progress)`. `make_on_progress` is called once all have started."""
    if count == 1:
        return [work(0, make_on_progress())]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(target=_run, args=(work, part, sending), daemon=True) for part, (_, sending) in enumerate(pipes)
    ]
    for process, (_, sending) in zip(processes, pipes, strict=True):
        process.start()
        sending.close()  # so that the end of the process is the end of its pipe
    try:
        return _gather([receiving for receiving, _ in pipes], make_on_progress())
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _run(work: Callable[[int, OnProgress], Any], part: int, pipe: Connection) -> None:
    try:
        pipe.send(("result", work(part, lambda answered: pipe.send(("progress", answered)))))
    except BoughError as error:
        pipe.send(("error", error))
    except KeyboardInterrupt:
        return  # the parent has been interrupted too, and ends the command


def _gather(pipes: list[Connection], on_progress: OnProgress) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for readable in wait([pipe for part, pipe in enumerate(pipes) if part not in results]):
            pipe = cast(Connection, readable)
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise EngineDeadError("A client process of the benchmark has died.") from None
            if kind == "progress":
                on_progress(value)
            elif kind == "error":
                raise cast(BoughError, value)
            else:
                results[pipes.index(pipe)] = value
    return [results[part] for part in range(len(pipes))]

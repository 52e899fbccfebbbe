"""The event loop on which programs wait for their back ends: one for the process, in a thread of its own.

A thousand branches are a thousand tasks and no thread, and a cancellation reaches the request itself.
"""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="bough-lang").start()
    return loop


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine on the loop; the caller may wait for it, or leave."""
    return asyncio.run_coroutine_threadsafe(work, background_loop())


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the loop and gives its result; an interrupt cancels it."""
    future = start(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise

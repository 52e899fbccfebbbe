"""Work on a thread of its own, which does not keep the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_daemon_thread(work: Callable[..., T], *arguments: Any) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001  (raised again where the result is taken)
            future.set_exception(error)

    threading.Thread(target=call, daemon=True, name="bough-aside").start()
    return future

"""The work of one request's masks: done on the spot while it is quick, on a thread of its own once it was not.

A mask takes microseconds, but a grammar can be written for which it takes long, and a step waits for the masks of all
its rows. So whoever has once been slow is worked out beside the loop (the back ends let go of the interpreter for it):
the step goes on without that row, which tries again in the next, and a mask that takes far too long ends its request.
Owns the thread; the matcher belongs to the request's `Constraint`, which does not touch it while a mask is awaited.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np

from bough.constrained.interface import Matcher
from bough.core.errors import RequestError
from bough.core.plan import IntArray

SLOW_S = 0.005  # of computing for one mask: from then on nobody waits for this request
PATIENCE_S = 0.004  # that a step waits for all its slow rows together
LIMIT_S = 5.0  # for one mask
NICE = 5  # the model goes first
_places = threading.Semaphore(2)  # slow masks that are worked out at the same time, in the whole process


class MaskWork:
    """`fill` as often as a mask is wanted; it says whether the mask has come."""

    def __init__(self, matcher: Matcher, clock: Callable[[], float] = time.thread_time) -> None:
        self._matcher = matcher
        self._clock = clock  # what the computing costs, whoever else uses the machine
        self._task: _Task | None = None
        self.slow = False

    def fill(self, words: IntArray, deadline: float | None = None) -> bool:
        """Writes what may come next. False: it is not worked out by the `deadline` (of `time.monotonic`); ask again. A
        `RequestError` when it takes too long, or the back end gives up."""
        if not self.slow:
            began = self._clock()
            self._matcher.fill(words)
            self.slow = self._clock() - began > SLOW_S
            return True
        if self._task is None:
            self._task = _Task(self._matcher, len(words))
        if not self._task.done.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            if self._task.took_s > LIMIT_S:
                raise RequestError(
                    f"The grammar is too ambiguous: what may come next takes longer than {LIMIT_S:g} s to work out; "
                    "write it so that one character decides how a text is read."
                )
            return False
        task, self._task = self._task, None
        words[:] = task.result()
        return True


class _Task:
    """One mask on one thread. Nothing waits for it at the engine's end."""

    def __init__(self, matcher: Matcher, size: int) -> None:
        self.done = threading.Event()
        self._matcher = matcher
        self._words: IntArray = np.zeros(size, dtype=np.int32)
        self._error: BaseException | None = None
        self._began: float | None = None
        threading.Thread(target=self._run, name="slow-mask", daemon=True).start()

    @property
    def took_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def result(self) -> IntArray:
        if self._error is not None:
            raise self._error
        return self._words

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        with _places:
            self._began = time.monotonic()
            try:
                self._matcher.fill(self._words)
            except BaseException as error:  # noqa: BLE001  (the loop raises it where it asks)
                self._error = error
        self.done.set()

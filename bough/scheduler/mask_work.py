"""The work of one request's masks: done on the spot while it is quick, on a thread of its own once it was not.

A mask takes microseconds, but a grammar can be written for which it takes long, and a step waits for the masks of all
its rows. So whoever was slow is worked out beside the loop (the back ends let go of the interpreter for it) until it
has been quick for a while: steps go on without that row, which tries again in the next, and a mask that takes far too
long ends its request. Owns the thread; the matcher belongs to the request's `Constraint`, which does not touch it while
a mask is awaited.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np

from bough.constrained.interface import Matcher
from bough.core.errors import RequestError
from bough.core.plan import IntArray

SLOW_S = 0.005  # of computing for one mask: from then on nobody waits for this request
QUICK_RUN = 8  # masks without being slow, until it is trusted again
PATIENCE_S = 0.004  # that a step waits for all its slow rows together
LIMIT_S = 5.0  # for one mask
NICE = 5  # the model goes first
_places = threading.Semaphore(2)  # slow masks that are worked out at the same time, in the whole process


class MaskWork:
    """`fill` as often as a mask is wanted; it says whether the mask has come."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._task: _Task | None = None
        self._distrust = 0  # masks that must be quick before one is worked out on the spot

    @property
    def slow(self) -> bool:
        return self._distrust > 0

    def fill(self, words: IntArray, deadline: float | None = None) -> bool:
        """Writes what may come next. False: it is not worked out by the `deadline` (of `time.monotonic`); ask again. A
        `RequestError` when it takes too long, or the back end gives up."""
        if not self.slow:
            self._note(_timed_fill(self._matcher, words))
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
        self._note(task.cost_s)
        return True

    def _note(self, cost_s: float) -> None:
        self._distrust = QUICK_RUN if cost_s > SLOW_S else max(0, self._distrust - 1)


def _timed_fill(matcher: Matcher, words: IntArray) -> float:
    """Fills a mask; the seconds of computing that it took, whoever else uses the machine."""
    began = time.thread_time()
    matcher.fill(words)
    return time.thread_time() - began


class _Task:
    """One mask on one thread. Nothing waits for it at the engine's end."""

    def __init__(self, matcher: Matcher, size: int) -> None:
        self.done = threading.Event()
        self._matcher = matcher
        self._words: IntArray = np.zeros(size, dtype=np.int32)
        self._error: BaseException | None = None
        self._began: float | None = None
        self.cost_s = 0.0
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
                self.cost_s = _timed_fill(self._matcher, self._words)
            except BaseException as error:  # noqa: BLE001  (the loop raises it where it asks)
                self._error = error
        self.done.set()

"""The work of one request's grammar: on the spot where it is quick, masks on a thread where it is not, or not known to
be: a grammar's first ones, and those of a request whose masks were slow.

A step waits for the masks of all its rows, and a grammar can be written whose masks take long. Steps go on without such
a row until its mask is there. A mask that takes far too long ends its request, and so does more than a fair share of
the loop's time. Owns the thread; the request's `Constraint` does not touch the matcher while a mask is awaited.
"""

import os
import threading
import time

import numpy as np

from bough.constrained.interface import Compiled, Matcher
from bough.core.errors import RequestError
from bough.core.plan import IntArray

SLOW_S = 0.005  # of computing for one mask: from then on nobody waits for this request
QUICK_RUN = 8  # masks without being slow, until it is trusted again
PATIENCE_S = 0.004  # that a step waits for all its slow rows together
LIMIT_S = 5.0  # of computing for one mask
WAIT_S = 60.0  # for a place to compute it
FAIR_S = 0.002  # of the loop's time for each token
CREDIT_S = 0.25  # that a request may take beyond it, all in all
NICE = 10  # the model goes first
PLACES = 2  # slow masks that are worked out at the same time, in the whole process
MOST = 8  # threads of slow masks, with those that took too long: nothing can end them, but others need their places
_computing: set["_Task"] = set()
_changed = threading.Condition()  # of `_computing`


class MaskWork:
    """`accept` each token, `fill` as often as a mask is wanted: it says whether the mask has come."""

    def __init__(self, matcher: Matcher, grammar: Compiled) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._task: _Task | None = None
        self._quick = 0  # masks that were
        self._distrust = 0  # masks that must be quick before one is worked out on the spot
        self._debt_s = 0.0  # what it took of the loop's time beyond its share

    @property
    def slow(self) -> bool:
        return self._distrust > 0

    @property
    def busy(self) -> bool:
        """A mask is being worked out, and there is no sense in asking for it yet."""
        task = self._task
        return task is not None and not task.done.is_set() and task.cost_s <= LIMIT_S and task.waits_s <= WAIT_S

    def accept(self, token: int) -> bool:
        """Steps over a token; False, and nothing has changed, where the grammar does not allow it."""
        began = time.thread_time()
        taken = self._matcher.accept(token)
        self._debt_s = max(0.0, self._debt_s + time.thread_time() - began - FAIR_S)
        return taken

    def fill(self, words: IntArray, deadline: float | None = None) -> bool:
        """Writes what may come next. False: it is not worked out by the `deadline` (of `time.monotonic`); ask again. A
        `RequestError` when it takes too long, or the back end gives up. Without a deadline nothing may be slow."""
        if self._debt_s > CREDIT_S:
            raise _too_ambiguous("more time than others can spare")
        if not self.slow and (deadline is None or self._grammar.tried):
            began = time.thread_time()  # which leaves out what others use of the machine
            self._matcher.fill(words)
            cost_s = time.thread_time() - began
            self._debt_s += cost_s
            self._note(cost_s)
            return True
        if self._task is None:
            self._task = _Task(self._matcher, len(words))
        if not self._task.done.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            if self._task.cost_s > LIMIT_S:
                raise _too_ambiguous(f"longer than {LIMIT_S:g} s")
            if self._task.waits_s > WAIT_S:
                text = "Too many grammars take long at the same time; try again later, or write this one more simply."
                raise RequestError(text, status_code=503, err_type="ServiceUnavailableError")
            return False
        task, self._task = self._task, None
        words[:] = task.result()
        self._note(task.cost_s)
        return True

    def _note(self, cost_s: float) -> None:
        slow = cost_s > SLOW_S
        self._distrust = QUICK_RUN if slow else max(0, self._distrust - 1)
        self._quick += not slow
        self._grammar.tried |= self._quick >= QUICK_RUN


def _too_ambiguous(how_long: str) -> RequestError:
    return RequestError(
        f"The grammar is too ambiguous: what may come next takes {how_long} to work out; write it so that one "
        "character decides how a text is read."
    )


class _Task:
    """One mask on one thread. Nothing waits for it at the engine's end."""

    def __init__(self, matcher: Matcher, size: int) -> None:
        self.done = threading.Event()
        self._matcher = matcher
        self._words: IntArray = np.zeros(size, dtype=np.int32)
        self._error: BaseException | None = None
        self._spent_s = 0.0
        self._clock: int | None = None  # of the thread's computing, while it does
        self._asked: float | None = time.monotonic()  # None: it has a place
        threading.Thread(target=self._run, name="slow-mask", daemon=True).start()

    @property
    def cost_s(self) -> float:
        """Seconds of computing so far, whoever else uses the machine."""
        clock = self._clock
        try:
            return self._spent_s if clock is None else time.clock_gettime(clock)
        except OSError:  # the thread has just ended
            return self._spent_s

    @property
    def waits_s(self) -> float:
        """Seconds that it has been waiting for a place."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def result(self) -> IntArray:
        if self._error is not None:
            raise self._error
        return self._words

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        with _changed:
            while len(_computing) >= MOST or sum(task.cost_s <= LIMIT_S for task in _computing) >= PLACES:
                _changed.wait(0.1)  # within which one may turn out to take too long
            self._asked, self._clock = None, time.pthread_getcpuclockid(threading.get_ident())
            _computing.add(self)
        try:
            self._matcher.fill(self._words)
        except BaseException as error:  # noqa: BLE001  (the loop raises it where it asks)
            self._error = error
        self._spent_s, self._clock = time.thread_time(), None
        with _changed:
            _computing.remove(self)
            _changed.notify_all()
        self.done.set()

"""Worker processes and who gets one: a spec that takes too long is refused, for its request alone.

A worker is started when a spec needs one and kept for the next. At most `size` run at a time, and a spec waits for a
free one. Owned here: the processes. Which grammars need one is left to `compiler`, and the clock over each spec to
`worker`.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe

import msgspec

from bough.constrained.interface import GrammarSpec
from bough.constrained.worker import Hello, Outcome
from bough.core.errors import RequestError

START_TIMEOUT_S = 120.0  # importing the libraries on a busy machine
GRACE_S = 30.0  # beyond a spec's own time, until a worker is given up that says nothing


class WorkerPool:
    """Called from threads, each of which waits for its own spec. `doing` names what is done to it, `setting` the flag
    that bounds it, where one does."""

    def __init__(self, hello: Hello, size: int, doing: str, setting: str | None = None) -> None:
        self._hello = msgspec.msgpack.encode(hello)
        self._timeout_s = hello.timeout_s
        self._doing = doing
        self._limit = f"{hello.timeout_s:g} s" if setting is None else f"{hello.timeout_s:g} s ({setting})"
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)  # a place without a process yet
        self._running: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, spec: GrammarSpec) -> bytes:
        """What a worker makes of a spec; a `RequestError` when it is refused, takes too long, or needs too much."""
        worker = self._free.get()
        try:
            if worker is None:
                worker = self._start()
            outcome = worker.ask(msgspec.msgpack.encode(spec), self._timeout_s + GRACE_S)
        except (TimeoutError, EOFError, ConnectionError):
            self._end(worker)
            worker, outcome = None, Outcome(ended=signal.SIGKILL)
        finally:
            self._free.put(worker)
        if outcome.ended:
            late = outcome.ended == signal.SIGALRM
            reason = f"takes longer than {self._limit}" if late else "needs more memory or stack than it may have"
            raise RequestError(f"The grammar is too complex: {self._doing} it {reason}; make it smaller.")
        if outcome.error is not None:
            raise RequestError(outcome.error, field=outcome.field)
        return outcome.payload

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running, self._running = self._running, set()
        for worker in running:
            worker.end()

    def _start(self) -> _Worker:
        worker = _Worker()
        with self._lock:
            if self._closed:
                worker.end()
                raise EOFError("the engine is closing")
            self._running.add(worker)
        try:
            worker.ask(self._hello, START_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError):
            self._end(worker)
            if self._closed:
                raise
            raise ChildProcessError("a process for grammars did not start") from None
        return worker

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end()
            with self._lock:
                self._running.discard(worker)


class _Worker:
    """One process, with the children it has, and the connection to it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bough.constrained.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that its children can be ended with it
            )
        self._asked = threading.Lock()

    def ask(self, message: bytes, timeout_s: float) -> Outcome:
        with self._asked:
            self._connection.send_bytes(message)
            if not self._connection.poll(timeout_s):
                raise TimeoutError
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Outcome)

    def end(self) -> None:
        """Kills the process. The connection is closed only after a waiting `ask` has noticed."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._asked:
            self._connection.close()

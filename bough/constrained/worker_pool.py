"""Worker processes and the clock over them: a task that takes too long ends with its process, for its request alone.

A worker is started when a task needs one and kept for the next; one that was ended is replaced at once, so that the
next task does not pay for it. At most `size` run at a time. A task waits for a free one, but no longer than it may
take itself: whoever asks has an answer in about that time, however many ask. Owned here: the processes. Which grammars
need one is left to `compiler`.
"""

from __future__ import annotations

import os
import queue
import selectors
import subprocess
import sys
import threading
import time

import msgspec

from bough.constrained.interface import GrammarSpec
from bough.constrained.worker import LENGTH, Hello, Outcome, write_frame
from bough.core.errors import RequestError

START_TIMEOUT_S = 120.0  # importing the libraries on a busy machine
CHUNK = 1 << 20


class BusyError(RequestError):
    """No worker was free in time: nothing is known of the grammar."""

    def __init__(self) -> None:
        super().__init__(
            "The engine is busy with other grammars; try again.", status_code=503, err_type="ServiceUnavailable"
        )


class WorkerPool:
    """Does tasks in processes; called from threads, each of which waits for its own. `doing` names the tasks, `setting`
    the flag that bounds them, where one does."""

    def __init__(self, hello: Hello, timeout_s: float, size: int, doing: str, setting: str | None = None) -> None:
        self._hello = msgspec.msgpack.encode(hello)
        self._timeout_s = timeout_s
        self._doing = doing
        self._limit = f"{timeout_s:g} s" if setting is None else f"{timeout_s:g} s ({setting})"
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)  # a place without a process yet
        self._running: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, spec: GrammarSpec) -> bytes:
        """What the task gives; a `RequestError` when it is refused, takes too long, or kills its process."""
        try:
            worker = self._free.get(timeout=self._timeout_s)
        except queue.Empty:
            raise BusyError from None
        try:
            if worker is None:
                worker = self._start()
            outcome = worker.ask(msgspec.msgpack.encode(spec), self._timeout_s)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self._replace(worker)
            if isinstance(error, TimeoutError):
                reason = f"takes longer than {self._limit}"
            else:
                reason = "needs more memory or stack than it may have"
            raise RequestError(f"The grammar is too complex: {self._doing} it {reason}; make it smaller.") from None
        except BaseException:
            self._free.put(worker)
            raise
        self._free.put(worker)
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
        worker.ask(self._hello, START_TIMEOUT_S)
        return worker

    def _replace(self, worker: _Worker | None) -> None:
        """Ends a worker and starts another in its place, without having anybody wait for that."""
        if worker is None:  # it did not even start: the next task tries again
            self._free.put(None)
            return
        worker.end()
        with self._lock:
            self._running.discard(worker)
        threading.Thread(target=self._start_anew, name="grammar-worker-start", daemon=True).start()

    def _start_anew(self) -> None:
        worker = None
        try:
            worker = self._start()
        except (TimeoutError, EOFError, BrokenPipeError):
            return  # the engine is closing, or the next task learns why no worker starts
        finally:
            self._free.put(worker)


class _Worker:
    """One process and the pipes to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bough.constrained.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # both are pipes
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def ask(self, message: bytes, timeout_s: float) -> Outcome:
        deadline = time.monotonic() + timeout_s
        write_frame(self._stdin, message)
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        return msgspec.msgpack.decode(self._read(length, deadline), type=Outcome)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdout.close()
        try:
            self._stdin.close()
        except BrokenPipeError:
            return  # what it had not read yet is of no use to anybody

    def _read(self, size: int, deadline: float) -> bytes:
        parts, missing = [], size
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while missing:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = os.read(self._stdout.fileno(), min(missing, CHUNK))
                if not part:
                    raise EOFError
                parts.append(part)
                missing -= len(part)
        return b"".join(parts)

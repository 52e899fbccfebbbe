"""Processes of this package's own that answer messages over one connection each: a process can be ended when it is
stuck, and a thread cannot.

Each is given the number of its end as an argument, and ends when the other end is closed.
"""

import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from bough.core.child_environment import child_environment

START_TIMEOUT_S = 120.0  # importing libraries on a busy machine
PATIENCE = 10  # for work whose CPU time is limited: so much more of the clock, for what runs beside it


class PipeProcess:
    def __init__(self, module: str) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that its children can be ended with it
                env=child_environment(),
            )
        self._cpu_clock = ~self._process.pid << 3 | 2  # as clock_getcpuclockid(3) has it, which Python has not
        self._asked = threading.Lock()

    def ask(self, message: bytes, timeout_s: float, patience: int = 1) -> bytes:
        """Raises `TimeoutError` when so much time has passed and the process has computed for as long, or when
        `patience` times as much has passed; `EOFError` or `ConnectionError` where the process has ended."""
        with self._asked:
            self._connection.send_bytes(message)
            until, computed = time.monotonic() + patience * timeout_s, time.clock_gettime(self._cpu_clock)
            left = timeout_s
            while not self._connection.poll(left):
                left = timeout_s - (time.clock_gettime(self._cpu_clock) - computed)
                if left <= 0 or time.monotonic() >= until:
                    raise TimeoutError
            return self._connection.recv_bytes()

    def was_killed(self) -> bool:
        """Whether it has ended by no fault of what it was asked: the kernel, or somebody, has killed it."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0) == -signal.SIGKILL
        return False

    def end(self) -> None:
        """Kills the process. The connection is closed only after a waiting `ask` has noticed."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._asked:
            self._connection.close()
        self._process.wait()  # last: its clock is gone then, which `ask` reads


def answer_all(connection: Connection, answer: Callable[[bytes], bytes], more_bytes: int, timeout_s: float) -> None:
    """What such a process does with what strangers send, until the other end is closed: it gets so much memory
    beyond what it occupies now. `PipeProcess.ask` limits its time; a timer ends it if its parent is gone."""
    os.nice(5)  # the model goes first
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send_bytes(b"")
    with suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_REAL, PATIENCE * timeout_s)
            answered = answer(message)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.send_bytes(answered)


class ProcessPool:
    """Called from threads, each of which waits for its own answer. A process starts when it is first needed, or by
    `warm`, with a hello that it answers, and another takes its place when it does not answer in time, or ends."""

    def __init__(self, module: str, hello: bytes, size: int) -> None:
        self._module = module
        self._hello = hello
        self._free: queue.LifoQueue[PipeProcess | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)  # a place without a process yet
        self._running: set[PipeProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def warm(self) -> None:
        """Starts a process before it is needed."""
        process = self._free.get()
        try:
            process = process or self._start()
        finally:
            self._free.put(process)

    def exchange(self, message: bytes, timeout_s: float, patience: int = 1) -> bytes | None:
        """None where there is no answer."""
        process = self._free.get()
        try:
            process = process or self._start()
            try:
                return process.ask(message, timeout_s, patience)
            except (EOFError, ConnectionError):
                if not process.was_killed():
                    raise
                self._end(process)
                process = None  # its place stays empty if another one does not start
                process = self._start()
                return process.ask(message, timeout_s, patience)
        except (TimeoutError, EOFError, ConnectionError):
            self._end(process)
            process = None
            return None
        finally:
            self._free.put(process)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running, self._running = self._running, set()
        for process in running:
            process.end()

    def _start(self) -> PipeProcess:
        process = PipeProcess(self._module)
        with self._lock:
            if self._closed:
                process.end()
                raise EOFError("the engine is closing")
            self._running.add(process)
        try:
            process.ask(self._hello, START_TIMEOUT_S)
        except (TimeoutError, EOFError, ConnectionError):
            self._end(process)
            if self._closed:
                raise
            raise ChildProcessError(f"a process of {self._module} did not start") from None
        return process

    def _end(self, process: PipeProcess | None) -> None:
        if process is not None:
            process.end()
            with self._lock:
                self._running.discard(process)

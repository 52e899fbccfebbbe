"""Processes in which grammars are prepared or compiled, because a process can be ended, and a thread cannot.

Each reads a hello, then one spec after the other, and answers each with an outcome, as msgpack over one connection.
With a vocabulary in the hello it compiles, without one it prepares. Each spec has a child process with a timer, so that
what was loaded stays. `CompilerPool` starts processes and hands them out.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from bough.constrained.backends import load_backend
from bough.constrained.interface import GrammarSpec
from bough.constrained.prepare import Prepared, prepare
from bough.constrained.vocabulary import Vocabulary
from bough.core.errors import BoughError, RequestError

MEMORY_BYTES = 4 << 30  # what one spec may take beyond what the libraries themselves occupy


class Hello(msgspec.Struct, frozen=True):
    backend: str
    vocabulary: Vocabulary | None  # None: it prepares
    timeout_s: float  # for each spec


class Outcome(msgspec.Struct, frozen=True):
    payload: bytes = b""
    error: str | None = None
    field: str | None = None
    ended: int = 0  # the signal, or the exit code, that its child ended with before it had an answer


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    hello = msgspec.msgpack.decode(connection.recv_bytes(), type=Hello)
    work = _work_for(hello)
    connection.send_bytes(msgspec.msgpack.encode(Outcome()))
    while True:
        spec = msgspec.msgpack.decode(connection.recv_bytes(), type=GrammarSpec)
        ended = _in_child(lambda spec=spec: _answer(work, spec, hello.timeout_s, connection))  # type: ignore[misc]
        if ended:
            connection.send_bytes(msgspec.msgpack.encode(Outcome(ended=ended)))


def _in_child(task: Callable[[], None]) -> int:
    """Runs a task in a child; 0, or what it ended with."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            task()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _answer(work: Callable[[GrammarSpec], bytes], spec: GrammarSpec, timeout_s: float, connection: Connection) -> None:
    """Writes what comes of a spec; the clock ends the process unless that comes in time."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    outcome = _outcome(work, spec)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    connection.send_bytes(msgspec.msgpack.encode(outcome))


def _work_for(hello: Hello) -> Callable[[GrammarSpec], bytes]:
    if hello.vocabulary is None:
        return lambda spec: msgspec.msgpack.encode(_prepare(spec, hello.backend))
    os.nice(5)  # the model goes first
    return load_backend(hello.backend, hello.vocabulary).compile


def _prepare(spec: GrammarSpec, backend: str) -> Prepared:
    prepared = prepare(spec, backend)
    if prepared.backend == "llguidance":
        from bough.constrained.llguidance_backend import check_grammar

        check_grammar(prepared.spec)
    return prepared


def _outcome(work: Callable[[GrammarSpec], bytes], spec: GrammarSpec) -> Outcome:
    try:
        return Outcome(work(spec))
    except RequestError as error:
        return Outcome(error=str(error), field=error.field)
    except RecursionError:
        return Outcome(error="The grammar leads from one part to the next too deep to be followed; make it flatter.")
    except MemoryError:
        return Outcome(error="The grammar needs too much memory to compile; make it smaller.")
    except Exception as error:  # noqa: BLE001  (a defect, which must not stay unseen, concerns one request alone)
        traceback.print_exc()
        return Outcome(error=f"The grammar cannot be read ({type(error).__name__}: {error}); please report it.")


# ---- in the engine: the processes, and who gets one

START_TIMEOUT_S = 120.0  # importing the libraries on a busy machine
GRACE_S = 30.0  # beyond a spec's own time, until a process is given up that says nothing


class CompilerPool:
    """Called from threads, each of which waits for its own spec. `doing` names what is done to it, `setting` the flag
    that bounds it, where one does."""

    def __init__(self, hello: Hello, size: int, doing: str, setting: str | None = None) -> None:
        self._hello = msgspec.msgpack.encode(hello)
        self._timeout_s = hello.timeout_s
        self._doing = doing
        self._limit = f"{hello.timeout_s:g} s" if setting is None else f"{hello.timeout_s:g} s ({setting})"
        self._free: queue.LifoQueue[_CompilerProcess | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)  # a place without a process yet
        self._running: set[_CompilerProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, spec: GrammarSpec) -> bytes:
        """What a process makes of a spec; a `RequestError` when it is refused, takes too long, or needs too much."""
        process = self._free.get()
        try:
            if process is None:
                process = self._start()
            outcome = process.ask(msgspec.msgpack.encode(spec), self._timeout_s + GRACE_S)
        except (TimeoutError, EOFError, ConnectionError):
            self._end(process)
            process, outcome = None, Outcome(ended=signal.SIGKILL)
        finally:
            self._free.put(process)
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
        for process in running:
            process.end()

    def _start(self) -> _CompilerProcess:
        process = _CompilerProcess()
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
            raise ChildProcessError("a process for grammars did not start") from None
        return process

    def _end(self, process: _CompilerProcess | None) -> None:
        if process is not None:
            process.end()
            with self._lock:
                self._running.discard(process)


class _CompilerProcess:
    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bough.constrained.compiler_process", str(theirs.fileno())],
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


if __name__ == "__main__":
    try:
        main()
    except EOFError:
        pass  # the engine has ended
    except BoughError as error:
        raise SystemExit(str(error)) from None

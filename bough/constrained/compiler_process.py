"""Processes in which grammars are prepared or compiled, because a process can be ended, and a thread cannot.

Each reads a hello, then one spec after the other, and answers each with an outcome, as msgpack over one connection.
With a vocabulary in the hello it compiles, without one it prepares. Each spec has a child process with a timer, so that
what was loaded stays. `CompilerPool` starts processes and hands them out.
"""

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from bough.constrained.backends import load_backend
from bough.constrained.interface import GrammarSpec
from bough.constrained.vocabulary import Vocabulary
from bough.core.errors import BoughError, RequestError
from bough.core.pipe_process import ProcessPool

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


read_outcome = msgspec.msgpack.Decoder(Outcome).decode  # made here: msgspec crashes if two threads begin with a type


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
    """Imports what the work needs, which the engine, whose module this is too, does not."""
    if hello.vocabulary is not None:
        os.nice(5)  # the model goes first
        return load_backend(hello.backend, hello.vocabulary).compile
    from bough.constrained.llguidance_backend import check_grammar
    from bough.constrained.prepare import prepare

    def work(spec: GrammarSpec) -> bytes:
        prepared = prepare(spec, hello.backend)
        if prepared.backend == "llguidance":
            check_grammar(prepared.spec)
        return msgspec.msgpack.encode(prepared)

    return work


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

GRACE_S = 30.0  # beyond a spec's own time, until a process is given up that says nothing


class CompilerPool(ProcessPool):
    """`doing` names what is done to a spec, `setting` the flag that bounds it, where one does."""

    def __init__(self, hello: Hello, size: int, doing: str, setting: str | None = None) -> None:
        super().__init__("bough.constrained.compiler_process", msgspec.msgpack.encode(hello), size)
        self._timeout_s = hello.timeout_s
        self._doing = doing
        self._limit = f"{hello.timeout_s:g} s" if setting is None else f"{hello.timeout_s:g} s ({setting})"

    def ask(self, spec: GrammarSpec) -> bytes:
        """What a process makes of a spec; a `RequestError` when it is refused, takes too long, or needs too much."""
        for _ in range(2):  # what kills a process once need not be the grammar
            answer = self.exchange(msgspec.msgpack.encode(spec), self._timeout_s + GRACE_S)
            outcome = Outcome(ended=signal.SIGKILL) if answer is None else read_outcome(answer)
            if outcome.ended != signal.SIGKILL:
                break
        if outcome.ended:
            late = outcome.ended == signal.SIGALRM
            reason = f"takes longer than {self._limit}" if late else "needs more memory or stack than it may have"
            raise RequestError(f"The grammar is too complex: {self._doing} it {reason}; make it smaller.")
        if outcome.error is not None:
            raise RequestError(outcome.error, field=outcome.field)
        return outcome.payload


if __name__ == "__main__":
    try:
        main()
    except EOFError:
        pass  # the engine has ended
    except BoughError as error:
        raise SystemExit(str(error)) from None

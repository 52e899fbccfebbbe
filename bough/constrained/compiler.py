"""Compiles grammars and caches them by spec, for all requests of an engine.

A process prepares a spec, because Python's work would hold the engine's interpreter. A thread compiles a small
grammar; a second kind of process compiles a large one, because a process can be killed. Refusals are cached too.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from bough.constrained.backends import Backend, load_backend, resolve_backend
from bough.constrained.compiler_process import CompilerPool, Hello
from bough.constrained.interface import Compiled, GrammarSpec, Prepared, Ticket
from bough.constrained.vocabulary import Vocabulary
from bough.core.errors import RequestError

log = logging.getLogger(__name__)

SETTING = "--grammar-timeout-s"
PREPARERS = COMPILERS = 2
LIGHT_THREADS = 2  # beside those that wait for a preparer
PREPARE_TIMEOUT_S = 5.0  # at most: it takes milliseconds, and others wait behind it
NICE = 5
read_prepared = msgspec.msgpack.Decoder(Prepared).decode  # made here: msgspec crashes if two threads begin with a type
MOST_TEXT = 1 << 20  # characters of all grammars that are kept, each of which takes up to 200 bytes when it is compiled


class CompileTicket:
    def __init__(self, future: Future[Compiled], give_up: Callable[[], None]) -> None:
        self._future = future
        self._give_up = give_up
        self._cancelled = False

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Compiled:
        return self._future.result(timeout=0)

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._give_up()


@dataclass(slots=True)
class _Entry:
    future: Future[Compiled]
    waiting: int = 0


class CachingCompiler:
    """A compiler over one vocabulary, which a thread reads when the first grammar needs it. Nothing is loaded or
    started before a grammar is asked for."""

    def __init__(
        self,
        backend: str,
        read_vocabulary: Callable[[], Vocabulary],
        timeout_s: float = 10,
        cache_entries: int = 512,
        cache_text: int = MOST_TEXT,
    ) -> None:
        self._name = resolve_backend(backend)
        self._timeout_s = timeout_s
        self._read_vocabulary = read_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._compilers: CompilerPool | None = None
        self._backends: dict[str, Backend] = {}
        self._backend_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(PREPARERS + LIGHT_THREADS, "grammar", _stand_back)
        self._waiters = ThreadPoolExecutor(COMPILERS, "grammar", _stand_back)
        patience = min(timeout_s, PREPARE_TIMEOUT_S)
        self._preparers = CompilerPool(Hello(self._name, None, patience), PREPARERS, "preparing")
        self._entries: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
        self._capacity, self._most_text = cache_entries, cache_text
        self._lock = threading.Lock()

    def request(self, spec: GrammarSpec) -> Ticket:
        with self._lock:
            entry = self._entries.get(spec)
            if entry is None:
                entry = self._entries[spec] = _Entry(Future())
                self._threads.submit(self._prepare, spec, entry.future)
                self._drop_oldest()
            else:
                self._entries.move_to_end(spec)
            entry.waiting += 1
        return CompileTicket(entry.future, lambda: self._give_up(spec, entry))

    def close(self) -> None:
        self._preparers.close()
        if self._compilers is not None:
            self._compilers.close()
        for threads in (self._threads, self._waiters):
            threads.shutdown(wait=True, cancel_futures=True)

    # ---- the cache

    def _drop_oldest(self) -> None:
        """Keeps grammars that are still compiling: requests wait for them."""
        text = 0
        for count, (spec, entry) in enumerate(reversed(list(self._entries.items())), 1):
            text += len(spec.text)
            if (count > self._capacity or text > self._most_text) and entry.future.done():
                del self._entries[spec]

    def _give_up(self, spec: GrammarSpec, entry: _Entry) -> None:
        """One request fewer waits. A compile that nobody waits for is not started; a running one goes on."""
        with self._lock:
            entry.waiting -= 1
            if entry.waiting == 0 and entry.future.cancel() and self._entries.get(spec) is entry:
                del self._entries[spec]

    # ---- in threads

    def _prepare(self, spec: GrammarSpec, future: Future[Compiled]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        with self._answering(spec, future):
            prepared = read_prepared(self._preparers.ask(spec))
            backend = self._get_backend(prepared.backend)
            if prepared.light:
                future.set_result(Compiled(prepared.warnings, backend.load(prepared.spec), prepared.jumps))
            else:
                self._waiters.submit(self._compile, spec, prepared, backend, future)

    def _compile(self, spec: GrammarSpec, prepared: Prepared, backend: Backend, future: Future[Compiled]) -> None:
        assert self._compilers is not None, "the back end came with it"
        with self._answering(spec, future):
            made = self._compilers.ask(prepared.spec)
            future.set_result(Compiled(prepared.warnings, backend.load(prepared.spec, made), prepared.jumps))

    @contextmanager
    def _answering(self, spec: GrammarSpec, future: Future[Compiled]) -> Iterator[None]:
        """Passes errors to the waiting requests. An error that is not the grammar's fault is not cached."""
        try:
            yield
        except RequestError as error:
            future.set_exception(error)
        except Exception as error:
            log.exception("a grammar could not be compiled; its requests fail, others go on")
            with self._lock:
                self._entries.pop(spec, None)
            text = f"The grammar could not be compiled ({type(error).__name__}: {error}); see the server's log."
            future.set_exception(RequestError(text, status_code=500, err_type="InternalServerError"))

    def _get_backend(self, name: str) -> Backend:
        with self._backend_lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
                hello = Hello(self._name, self._vocabulary, self._timeout_s)
                self._compilers = CompilerPool(hello, COMPILERS, "compiling", SETTING)
            if name not in self._backends:
                self._backends[name] = load_backend(name, self._vocabulary)
            return self._backends[name]


def _stand_back() -> None:
    """Lowers the priority of this thread, and of those that a library starts from it, below the model's."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

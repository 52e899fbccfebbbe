"""The process in which grammars are prepared, or compiled, that might take too long: it can be ended, a thread cannot.

It reads a hello, then one spec after the other, and writes one outcome each, all as length-prefixed msgpack on its
standard streams. With a vocabulary in the hello it loads the back end and compiles. Without one it prepares, which
needs no back end; grammars for llguidance are compiled along with that, because it takes no longer. It ends when its
input does, so it never outlives the engine.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
import traceback
from collections.abc import Callable
from typing import IO

import msgspec

from bough.constrained.backends import load_backend
from bough.constrained.interface import GrammarSpec
from bough.constrained.prepare import Prepared, prepare
from bough.constrained.vocabulary import Vocabulary
from bough.core.errors import BoughError, RequestError

LENGTH = struct.Struct("<Q")
MEMORY_BYTES = 4 << 30  # what one task may take beyond what the libraries themselves occupy


class Hello(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    backend: str
    vocabulary: Vocabulary | None  # None: it prepares


class Draft(msgspec.Struct, frozen=True):
    """What comes of preparing: the spec for a back end, and its compiled form where it has one already."""

    prepared: Prepared
    payload: bytes | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What a task gave, or the reason why there is nothing."""

    payload: bytes = b""
    error: str | None = None
    field: str | None = None


def write_frame(stream: IO[bytes], message: bytes) -> None:
    stream.write(LENGTH.pack(len(message)))
    stream.write(message)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next message; None where the stream has ended."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return stream.read(length)


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not land between the frames
    first = read_frame(requests)
    if first is None:
        return
    work = _worker_for(msgspec.msgpack.decode(first, type=Hello))
    _limit_memory()
    write_frame(answers, msgspec.msgpack.encode(Outcome()))
    while (message := read_frame(requests)) is not None:
        outcome = _outcome(work, msgspec.msgpack.decode(message, type=GrammarSpec))
        write_frame(answers, msgspec.msgpack.encode(outcome))


def _worker_for(hello: Hello) -> Callable[[GrammarSpec], bytes]:
    if hello.vocabulary is None:
        return lambda spec: msgspec.msgpack.encode(_draft(spec, hello.backend))
    os.nice(5)  # the model goes first
    return load_backend(hello.backend, hello.vocabulary).compile


def _draft(spec: GrammarSpec, backend: str) -> Draft:
    prepared = prepare(spec, backend)
    if prepared.backend != "llguidance":
        return Draft(prepared)
    from bough.constrained.llguidance_backend import checked_grammar

    return Draft(prepared, checked_grammar(prepared.spec).encode())


def _outcome(work: Callable[[GrammarSpec], bytes], spec: GrammarSpec) -> Outcome:
    try:
        return Outcome(work(spec))
    except RequestError as error:
        return Outcome(error=str(error), field=error.field)
    except MemoryError:
        return Outcome(error="The grammar needs too much memory to compile; make it smaller.")
    except Exception as error:  # noqa: BLE001  (a defect, which must not stay unseen, concerns one request alone)
        traceback.print_exc()
        return Outcome(error=f"The grammar cannot be read ({type(error).__name__}: {error}); please report it.")


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    try:
        main()
    except BoughError as error:
        raise SystemExit(str(error)) from None

"""The process in which grammars are compiled that might take too long: it can be ended, a thread cannot.

It reads a hello with the back end and the vocabulary, then one spec after the other, and writes one outcome each, all
as length-prefixed msgpack on its standard streams. It ends when its input does, so it never outlives the engine.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
from typing import IO

import msgspec

from bough.constrained.backends import load_backend
from bough.constrained.interface import GrammarSpec
from bough.constrained.vocabulary import Vocabulary
from bough.core.errors import BoughError, RequestError

LENGTH = struct.Struct("<Q")
MEMORY_BYTES = 4 << 30  # what one compile may take beyond what the libraries themselves occupy


class Hello(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    backend: str
    vocabulary: Vocabulary


class Outcome(msgspec.Struct, frozen=True):
    """A compiled grammar, or the reason why there is none."""

    payload: bytes = b""
    error: str | None = None


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
    os.nice(5)  # the model goes first
    first = read_frame(requests)
    if first is None:
        return
    hello = msgspec.msgpack.decode(first, type=Hello)
    backend = load_backend(hello.backend, hello.vocabulary)
    _limit_memory()
    write_frame(answers, msgspec.msgpack.encode(Outcome()))
    while (message := read_frame(requests)) is not None:
        try:
            outcome = Outcome(backend.compile(msgspec.msgpack.decode(message, type=GrammarSpec)))
        except RequestError as error:
            outcome = Outcome(error=str(error))
        except MemoryError:
            outcome = Outcome(error="The grammar needs too much memory to compile; make it smaller.")
        write_frame(answers, msgspec.msgpack.encode(outcome))


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

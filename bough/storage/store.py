"""What every store does: batches of runs in and out, and no byte that is not what was put.

A run is 256 tokens of one namespace, whatever the page size; its name covers all that its content depends on. Stored
are a header, with name, length and checksum, and the run's bytes. A value that differs in any way is removed, counted
and answered with "not there". So is everything while a store fails: no request is worse off than without one.
"""

import logging
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Protocol, TypeAlias
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from bough.core.plan import IntArray

log = logging.getLogger(__name__)

Buffer: TypeAlias = npt.NDArray[np.uint8]  # [bytes of a run]
RUN_TOKENS = 256
HEADER = struct.Struct("<4s32sQI")
LINE_BYTES = 4096  # that the checksum sums up as 64-bit words
TIMEOUT_S, PAUSE_S = 5.0, 2.0  # for a server's answer; after a failure, in which nothing is tried


def run_keys(identity: Sequence[str], tokens: IntArray, after: str = "") -> list[str]:
    """Names of the whole runs in `tokens`, which begin a prompt or follow the run `after`. `identity` is what else the
    content depends on: weights, dtype, layout (KV group, page size and bytes, ranks), adapter, media's hash, salt."""
    link = bytes.fromhex(after) or blake2b(msgspec.json.encode(identity), digest_size=32).digest()
    runs = tokens[: len(tokens) // RUN_TOKENS * RUN_TOKENS].astype("<i4").reshape(-1, RUN_TOKENS)
    return [(link := blake2b(link + run.tobytes(), digest_size=32).digest()).hex() for run in runs]


def header_of(key: str, run: Any) -> bytes:
    """The checksum is the CRC of sums over lines and columns of words, and four times as fast as a CRC of all bytes: a
    changed word, sector or order changes a sum."""
    whole = len(run) // LINE_BYTES * LINE_BYTES
    words = run[:whole].view(np.uint64).reshape(-1, LINE_BYTES // 8)
    checksum = crc32(run[whole:], crc32(words.sum(axis=0), crc32(words.sum(axis=1))))
    return HEADER.pack(b"BKV1", bytes.fromhex(key), len(run), checksum)


class Backend(Protocol):
    """Where values lie; what cannot be done raises one of `errors`."""

    errors: tuple[type[Exception], ...]

    def exists(self, key: str) -> bool: ...  # which counts as a use
    def write(self, key: str, header: bytes, run: Buffer) -> bool: ...  # whether it had room
    def read(self, key: str, header: bytearray, run: Buffer) -> bool: ...  # a value of other length fills neither
    def remove(self, key: str) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class Store:
    """Calls block, and may come from several threads. `clear` removes the runs of other engines too. States behind runs
    are kept like these, but with `runs` 0 they do not count as such."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.clear, self.close, self.errors = backend, backend.clear, backend.close, backend.errors
        self.ask = backend.exists  # raises what the store fails with
        self.max_bytes: float = getattr(backend, "max_bytes", float("inf"))
        self.counts: Counter[str] = Counter()  # runs: written, dropped, found, missed, corrupt; failures
        self._pauses: dict[str, float] = {}  # until when

    def watch(self, tell: Callable[[tuple[str, bool]], object]) -> None:
        """Has it told what is there and what is not, as often as that is seen."""

        def telling(ask: Callable[..., Any], key: str, *given: Any) -> bool:
            tell((key, there := bool(ask(key, *given))))
            return there

        watched: Any = self._backend
        watched.exists, watched.write = partial(telling, watched.exists), partial(telling, watched.write)
        watched.remove, self._read = partial(telling, watched.remove), partial(telling, self._read)  # type: ignore[method-assign]

    def put(self, keys: Sequence[str], buffers: Sequence[Buffer], runs: int = 1) -> int:
        """Stores runs in their order, or finds them stored, and returns how many; the others are dropped."""
        known, write, given = self._backend.exists, self._backend.write, zip(keys, buffers, strict=True)
        done = self._leading("put", (known(key) or write(key, header_of(key, run), run) for key, run in given))
        self.counts.update(written=done * runs, dropped=len(keys) - done)
        return done

    def exists(self, keys: Sequence[str]) -> int:
        """How many of the first runs are there."""
        return self._leading("get", map(self._backend.exists, keys))

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer], runs: int = 1) -> int:
        """How many of the first runs were there; the buffers of the others may hold anything afterwards."""
        got = self._leading("get", (self._read(key, run) for key, run in zip(keys, buffers, strict=True)))
        self.counts.update(found=got * runs, missed=(len(keys) - got) * runs)
        return got

    def remove(self, keys: Sequence[str]) -> None:
        """What a failing store keeps is found out by the next request that reads it."""

        def removed(key: str) -> bool:
            self._backend.remove(key)
            return True

        self._leading("put", map(removed, keys))

    def _read(self, key: str, run: Buffer) -> bool:
        header = bytearray(HEADER.size)
        there = self._backend.read(key, header, run)
        if there and header != header_of(key, run):
            self.counts["corrupt"] += 1
            log.warning("run %s is damaged: it is removed from the store and computed anew", key)
            self._backend.remove(key)
            return False
        return there

    def _leading(self, way: str, steps: Iterable[bool]) -> int:
        """How many steps succeed before one does not. After a failure, nothing more is tried for a while."""
        done = 0
        try:
            for _ in takewhile(bool, steps if time.monotonic() >= self._pauses.get(way, 0.0) else ()):
                done += 1
        except self.errors as error:
            self._pauses[way] = time.monotonic() + PAUSE_S
            self.failed(error)
        return done

    def failed(self, error: BaseException | None) -> None:
        self.counts["failures"] += error is not None
        if error is not None and self.counts["failures"].bit_count() == 1:  # less and less often
            defect = None if isinstance(error, self.errors) else error
            log.warning("the store fails, so runs are computed instead: %s", error, exc_info=defect)

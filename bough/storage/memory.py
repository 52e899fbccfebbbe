"""A server that keeps runs in its memory for many engines (`bough store`), and the store that asks it.

Over TCP both speak ZeroMQ's CURVE with keys from BOUGH_CLUSTER_KEY: others get no answer. A unix socket has rights
instead, and is faster. A question is an operation, names and, for `put`, header and run, which stay in their frames.
"""

import threading
from typing import Any

import numpy as np
import zmq

from bough.core.errors import SettingsError
from bough.messages.channels import KEY_VARIABLE, TCP, cluster_key, use_key
from bough.storage.store import TIMEOUT_S, Buffer, log

PORT, TIMEOUT_MS = 30100, int(TIMEOUT_S * 1000)


class MemoryServer:
    """Runs that were not used for longest make room for others."""

    def __init__(self, url: str, max_bytes: int) -> None:
        self._runs: dict[bytes, list[Any]] = {}  # header and run, in the order of their last use
        self._max_bytes, self._used = max_bytes, 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        if url.startswith(TCP):
            use_key(self._socket, cluster_key(), listens=True)
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            raise SettingsError(f"Cannot listen on {url}: {error}.") from None
        log.info("%s keeps up to %.2f GB", url, max_bytes / 1e9)

    def serve(self) -> None:
        while True:
            operation, *frames = self._socket.recv_multipart(copy=False)
            self._socket.send_multipart(self.answer(operation.bytes, frames), copy=False)

    def answer(self, operation: bytes, frames: list[Any]) -> list[Any]:
        match operation, frames:
            case b"get" | b"exists", [key] if key.bytes in self._runs:
                self._runs[key.bytes] = self._runs.pop(key.bytes)
                return self._runs[key.bytes] if operation == b"get" else [b"there"]
            case b"put", [key, header, run] if len(run) <= self._max_bytes:
                self._drop(key.bytes)
                while self._used + len(run) > self._max_bytes:
                    self._drop(next(iter(self._runs)))
                self._runs[key.bytes] = [header, run]
                self._used += len(run)
                return [b"done"]
            case b"remove", keys:
                for name in [key.bytes for key in keys] or list(self._runs):
                    self._drop(name)
        return [b""]

    def _drop(self, key: bytes) -> None:
        self._used -= len(self._runs.pop(key, [b"", b""])[1])


class Memory:
    errors = (OSError,)

    def __init__(self, url: str = f"tcp://127.0.0.1:{PORT}") -> None:
        self._url, self._lock = url, threading.Lock()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        limits = {zmq.LINGER: 0, zmq.SNDTIMEO: TIMEOUT_MS, zmq.RCVTIMEO: TIMEOUT_MS}
        for option, value in {zmq.REQ_RELAXED: 1, zmq.REQ_CORRELATE: 1, **limits}.items():
            self._socket.setsockopt(option, value)  # late answers are not taken for those to the next question
        if url.startswith(TCP):
            use_key(self._socket, cluster_key(), listens=False)
        self._socket.connect(self._url)

    def clear(self) -> None:
        self._ask(b"remove")

    def close(self) -> None:
        self._socket.close()

    def _ask(self, *frames: Any) -> list[Any]:
        try:
            with self._lock:
                self._socket.send_multipart(frames, copy=False)
                return self._socket.recv_multipart(copy=False)
        except zmq.Again:
            raise TimeoutError(f"{self._url} does not answer; over TCP it needs the same {KEY_VARIABLE}") from None

    def exists(self, key: str) -> bool:
        return bool(self._ask(b"exists", key.encode())[0].bytes)

    def write(self, key: str, header: bytes, run: Buffer) -> bool:
        return bool(self._ask(b"put", key.encode(), header, run)[0].bytes)

    def read(self, key: str, header: bytearray, run: Buffer) -> bool:
        found = self._ask(b"get", key.encode())
        if len(found) == 2 and len(found[1]) == run.nbytes:
            header[:], run[:] = found[0].bytes, np.frombuffer(found[1].buffer, np.uint8)
        return len(found) == 2

    def remove(self, key: str) -> None:
        self._ask(b"remove", key.encode())

"""From `--hicache-storage-backend` to a store; Redis, or Valkey, through its package."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import numpy as np
import zmq

from bough.core.errors import SettingsError
from bough.core.yaml_file import read_yaml
from bough.storage.files import Files
from bough.storage.memory import Memory
from bough.storage.store import HEADER, TIMEOUT_S, Buffer, Store

PREFIX = "bough:"


def open_store(backend: str, extra_config: str | None = None) -> Store:
    """The configuration is JSON, or @FILE with JSON or YAML: a file keeps passwords out of `ps`."""
    text, kind = extra_config or "{}", BACKENDS[backend]
    options = {name: type(option.default) for name, option in inspect.signature(kind).parameters.items()}
    try:
        given = read_yaml(text[1:]) if text[0] == "@" else msgspec.json.decode(text, type=dict[str, Any])
        if any(type(value) is not options.get(name) for name, value in given.items()):
            known = ", ".join(f"{name} ({kind.__name__})" for name, kind in options.items())
            raise ValueError(f"the extra configuration is an object that may have {known}")
        return Store(kind(**given))
    except (msgspec.MsgspecError, ImportError, OSError, ValueError, zmq.ZMQError) as error:
        hint = f"; `pip install 'bough[{backend}]'`" if isinstance(error, ImportError) else ""
        raise SettingsError(f"--hicache-storage-backend {backend} (JSON or @FILE for more): {error}{hint}.") from None


class Redis:
    """How much is kept, and what goes first, is for the server's `maxmemory` and `maxmemory-policy` to say."""

    def __init__(self, url: str = "redis://127.0.0.1:6379") -> None:
        import redis

        self.errors = (redis.RedisError, OSError)
        self._redis = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self.close = self._redis.close

    def write(self, key: str, header: bytes, run: Buffer) -> bool:
        return bool(self._redis.set(PREFIX + key, header + run.tobytes()))

    def read(self, key: str, header: bytearray, run: Buffer) -> bool:
        value = self._redis.get(PREFIX + key)
        if value is not None and len(value) == HEADER.size + run.nbytes:
            header[:], run[:] = value[: HEADER.size], np.frombuffer(value, np.uint8, offset=HEADER.size)
        return value is not None

    def remove(self, key: str) -> None:
        self._redis.unlink(PREFIX + key)

    def clear(self) -> None:
        for name in self._redis.scan_iter(f"{PREFIX}*", 1000):
            self._redis.unlink(name)


BACKENDS: dict[str, Any] = {"file": Files, "memory": Memory, "redis": Redis}

"""From `--hicache-storage-backend` to a store; Redis, or Valkey, and Mooncake through their packages."""

import inspect
from typing import Any

import msgspec
import numpy as np
import zmq

from bough.core.errors import SettingsError
from bough.core.files import read_yaml
from bough.storage.files import Files
from bough.storage.lmcache import LMCache
from bough.storage.memory import Memory
from bough.storage.store import HEADER, TIMEOUT_S, Buffer, Store

PREFIX = "bough:"
LOCAL_BYTES = 256 << 20  # that Mooncake copies runs through
NO_ROOM, NOT_THERE = -200, -704  # what it answers


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

    def exists(self, key: str) -> bool:
        return bool(self._redis.touch(PREFIX + key))

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


class Mooncake:
    """Runs lie in memory that engines lend, each `global_segment_size` bytes of its host's; their master says where,
    and which make room. The options have SGLang's names."""

    errors = (OSError,)

    def __init__(
        self,
        master_server_address: str = "127.0.0.1:50051",
        metadata_server: str = "P2PHANDSHAKE",
        local_hostname: str = "127.0.0.1",
        global_segment_size: int = 4 << 30,
        protocol: str = "tcp",
        device_name: str = "",
    ) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store, sizes = MooncakeDistributedStore(), (global_segment_size, LOCAL_BYTES)
        place = local_hostname, metadata_server, *sizes, protocol, device_name, master_server_address
        if code := self._store.setup(*place):
            raise ConnectionError(f"Mooncake's master at {master_server_address} cannot be joined (error {code})")
        self.close = self._store.close

    def exists(self, key: str) -> bool:
        return self._ask("get_size", PREFIX + key, but=NOT_THERE) != NOT_THERE

    def write(self, key: str, header: bytes, run: Buffer) -> bool:
        return self._ask("put_parts", PREFIX + key, header, run.data, but=NO_ROOM) != NO_ROOM

    def read(self, key: str, header: bytearray, run: Buffer) -> bool:
        size = self._ask("get_size", PREFIX + key, but=NOT_THERE)
        value = self._store.get_buffer(PREFIX + key) if size == HEADER.size + run.nbytes else None
        if value is not None:
            header[:], run[:] = memoryview(value)[: HEADER.size], np.frombuffer(value, np.uint8, offset=HEADER.size)
        return size != NOT_THERE

    def remove(self, key: str) -> None:
        self._ask("remove", PREFIX + key, True, but=NOT_THERE)

    def clear(self) -> None:
        self._ask("remove_by_regex", f"^{PREFIX}", True)

    def _ask(self, method: str, *question: Any, but: int = 0) -> int:
        code = int(getattr(self._store, method)(*question))
        if code < 0 and code != but:
            raise OSError(f"Mooncake cannot do {method} (error {code})")
        return code


BACKENDS: dict[str, Any] = {"file": Files, "memory": Memory, "redis": Redis, "mooncake": Mooncake}
BACKENDS["lmcache"] = LMCache

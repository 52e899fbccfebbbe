"""Memory that NIXL reads: over UCX, which takes RDMA, shared memory or TCP, whatever there is."""

import threading
import time
import uuid
from typing import Any

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from bough.disaggregation.wire import Buffer

POLL_S = 0.001


class Nixl:
    def __init__(self) -> None:
        config = nixl_agent_config(backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent = nixl_agent(uuid.uuid4().hex, config)
        self._lock, self._peers = threading.Lock(), dict[bytes, Any]()  # by what they said of some memory

    def allocate(self, size: int) -> tuple[Buffer, bytes]:
        memory: Buffer = np.empty(size, dtype=np.uint8)
        held = self._agent.register_memory([(memory.ctypes.data, memory.size, 0, "")], "DRAM")
        about = self._agent.get_partial_agent_metadata(held, True, ["UCX"])
        return memory, msgspec.msgpack.encode((about, memory.ctypes.data))

    def read(self, place: bytes, into: Buffer) -> None:
        about, address = msgspec.msgpack.decode(place, type=tuple[bytes, int])
        with self._lock:
            if about not in self._peers:
                self._peers[about] = self._agent.add_remote_agent(about)
            peer = self._peers[about]
        here, there = (self._agent.get_xfer_descs([(at, into.size, 0)], "DRAM") for at in (into.ctypes.data, address))
        try:
            handle = self._agent.initialize_xfer("READ", here, there, peer)
            state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
            if state != "DONE":
                raise OSError(f"NIXL cannot read ({state})")
        except Exception:
            self._forget(peer)
            raise

    def _forget(self, peer: Any) -> None:
        """A connection that broke is not used again; the next read makes another."""
        with self._lock:
            if peer in self._peers.values():
                self._peers = {about: name for about, name in self._peers.items() if name != peer}
                self._agent.remove_remote_agent(peer)

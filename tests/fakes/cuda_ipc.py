"""CUDA's shared memory without a GPU: torch's functions that share and open storages, on memory of this process."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

UUID = "GPU-0123"


class FakeIpc:
    """Owns which storages were shared, how often each was opened, and the counts that keep a sender's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shared: dict[bytes, torch.UntypedStorage] = {}
        self.counts: dict[int, int] = {}
        self.opened: list[weakref.ref[torch.UntypedStorage]] = []
        self.refused: RuntimeError | None = None
        ipc = self

        def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
            number = len(ipc.shared)
            handle = b"c" + bytes(63) + bytes([number % 256, number // 256])  # as little text as a true one
            ipc.shared[handle], ipc.counts[number] = storage, 1
            return 0, handle, storage.nbytes(), 512, b"/torch_1", number, bytes(range(64)), True

        monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share, raising=False)
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", self._open, raising=False)
        monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", self._release, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def _open(self, *parts: Any) -> torch.UntypedStorage:
        device, handle, size, offset, counter, number, event, event_sync = parts
        assert (device, offset, counter, event, event_sync) == (0, 512, b"/torch_1", bytes(range(64)), True)
        if self.refused is not None:
            raise self.refused
        storage = self.shared[handle]
        assert size == storage.nbytes() and self.counts[number] > 0, "the sender has let go of it"
        view = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        opened = torch.from_numpy(view).untyped_storage()  # another storage of the same memory
        self.opened.append(weakref.ref(opened))
        return opened

    def _release(self, counter: bytes, number: int) -> None:
        assert counter == b"/torch_1"
        self.counts[number] -= 1

    def all_closed(self) -> bool:
        gc.collect()
        return all(storage() is None for storage in self.opened)

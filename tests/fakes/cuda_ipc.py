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
    """Owns which storages were shared, how often each was opened, and the counts that keep a sender's memory: in a file
    of torch's own making, as it keeps those of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shared: dict[bytes, torch.UntypedStorage] = {}
        self._counts = torch.zeros(64, dtype=torch.int64)
        _, self._counter, _ = self._counts.untyped_storage()._share_filename_cpu_()
        self.opened: list[weakref.ref[torch.UntypedStorage]] = []
        self.refused: RuntimeError | None = None
        ipc = self

        def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
            number = len(ipc.shared)
            handle = b"c" + bytes(63) + bytes([number % 256, number // 256])  # as little text as a true one
            ipc.shared[handle], ipc._counts[number] = storage, 1
            return 0, handle, storage.nbytes(), 512, ipc._counter, number, bytes(range(64)), True

        monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share, raising=False)
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", self._open, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def _open(self, *parts: Any) -> torch.UntypedStorage:
        device, handle, size, offset, counter, number, event, event_sync = parts
        assert (device, offset, counter, event, event_sync) == (0, 512, self._counter, bytes(range(64)), True)
        if self.refused is not None:
            raise self.refused
        storage = self.shared[handle]
        assert size == storage.nbytes()
        view = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        opened = torch.from_numpy(view).untyped_storage()  # another storage of the same memory
        self.opened.append(weakref.ref(opened))
        weakref.finalize(opened, self._let_go, number)
        return opened

    @property
    def counts(self) -> dict[int, int]:
        """Of each storage that was shared; torch frees its memory at 0 alone."""
        gc.collect()
        return dict(enumerate(self._counts[: len(self.shared)].tolist()))

    def _let_go(self, number: int) -> None:
        self._counts[number] -= 1

    def all_closed(self) -> bool:
        gc.collect()
        return all(storage() is None for storage in self.opened)

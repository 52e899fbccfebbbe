"""Handles of CUDA tensors: what is sent of them, what is opened, and what lets the sender's memory go."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bough.core.errors import RequestError
from bough.distributed.cuda_ipc import BEGINNING, PageMemory, open_handles, shared_handles
from bough.rl import shared_tensors
from tests.fakes.cuda_ipc import FakeIpc

FLAT = torch.arange(64, dtype=torch.float32)
TENSORS = {
    "large": torch.arange(4096.0).view(64, 64),
    "turned": torch.arange(2048.0).view(2, 1024).T,  # not contiguous
    "first": FLAT[:32].view(4, 8),  # which share a storage
    "second": FLAT[32:],
    "narrow": torch.full((3, 5), 2.5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
}


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    return FakeIpc(monkeypatch)


@pytest.mark.parametrize(("below", "storages"), [(129, 3), (1 << 20, 1), (1, 6)])
def test_tensors_arrive_whole_in_few_storages(ipc: FakeIpc, below: int, storages: int) -> None:
    with shared_handles(TENSORS, below) as content:
        assert content.startswith(BEGINNING) and set(ipc.counts.values()) == {1}
        assert len(ipc.shared) == len(msgspec.json.decode(content)["storages"]) == storages
        found = open_handles(content)
        assert list(found) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        if below < TENSORS["large"].nbytes:  # it is read where it is
            TENSORS["large"][0, 0] = -1.0
            assert found["large"][0, 0] == -1.0
            TENSORS["large"][0, 0] = 0.0
    assert set(ipc.counts.values()) == {0}, "the sender's memory can be freed"


def test_what_nobody_opens_is_let_go_too(ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), shared_handles(TENSORS, 0):
        raise KeyError
    share, limit = torch.UntypedStorage._share_cuda_, len(ipc.counts) + 2

    def fail_late(storage: torch.UntypedStorage) -> Any:
        if len(ipc.counts) == limit:
            raise RuntimeError("CUDA error")
        return share(storage)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", fail_late)
    with pytest.raises(RuntimeError, match="CUDA error"), shared_handles(TENSORS, 0):
        pass
    assert len(ipc.counts) == limit and set(ipc.counts.values()) == {0}


def test_wrong_handles_are_refused(ipc: FakeIpc) -> None:
    with shared_handles(TENSORS, 0) as content:
        good = msgspec.json.decode(content)

        def refused(reason: str, tensor: dict[str, Any] | None = None, storage: dict[str, Any] | None = None) -> None:
            tensors = [{**each, **(tensor or {})} for each in good["tensors"]]
            storages = [{**each, **(storage or {})} for each in good["storages"]]
            with pytest.raises(RequestError, match=reason):
                open_handles(msgspec.json.encode({**good, "tensors": tensors, "storages": storages}))

        refused("GPU GPU-9, which the engine does not see", storage={"gpu": "GPU-9"})
        refused("no handles of CUDA tensors .*base64", storage={"handle": "?"})
        refused("no handles of CUDA tensors", tensor={"shape": [-2, -3]})
        refused("large ends behind the memory", tensor={"shape": [4097]})
        refused("large ends behind the memory", tensor={"offset_bytes": 4})
        refused("large has an unknown number format .* or place", tensor={"offset_bytes": 2})
        refused("unknown number format .*nothing", tensor={"dtype": "nothing"})
        refused("unknown number format .*zeros", tensor={"dtype": "zeros"})
        refused("unknown number format", tensor={"storage": 9})
        ipc.refused = RuntimeError("invalid device context.\nDevice-side assertions")
        refused(r"cannot be opened \(invalid device context\); send tensors of the host's memory")


def test_a_trainers_tensors_stay_on_its_gpu(ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_tensors(TENSORS) as path:
        assert not Path(path).read_bytes().startswith(BEGINNING), "tensors of the host are safetensors"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    with shared_tensors(iter(TENSORS.items()), gather_below=129) as path:
        found, mode = open_handles(Path(path).read_bytes()), Path(path).stat().st_mode
    assert len(ipc.shared) == 3 and torch.equal(found["turned"], TENSORS["turned"])
    assert mode & 0o777 == 0o600 and not Path(path).exists()


class HostStream:
    device = torch.device("cpu")

    def __init__(self, device: int) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


def test_pages_of_another_engine_are_read_where_they_are(ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", HostStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    lender, reader = PageMemory(), PageMemory()
    assert lender.gpu in reader.gpus
    memory, handle = lender.allocate(1000)
    assert set(ipc.counts.values()) == {0}, "nothing but the lender keeps it"
    memory.copy_(torch.arange(1000))
    for into in (torch.zeros(300, dtype=torch.uint8), np.zeros(300, dtype=np.uint8)):
        reader.read(msgspec.msgpack.encode((handle, 200)), into)
        assert torch.equal(torch.as_tensor(into), memory[200:500]) and into[0] == 200
    assert len(ipc.opened) == 1 and not ipc.all_closed(), "it is opened once"
    assert reader._stream.synchronized == 2
    reader.forget()
    assert ipc.all_closed()
    with pytest.raises(RequestError, match="no handles of CUDA tensors"):
        reader.read(msgspec.msgpack.encode((b"nonsense", 0)), memory)


def test_gpus_that_reach_each_other_are_read_too(ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", HostStream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 2)
    memory = PageMemory()
    assert memory.gpu == "GPU-1" and memory.gpus == ("GPU-1", "GPU-0", "GPU-3")

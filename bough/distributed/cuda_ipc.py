# mypy: disable-error-code="no-untyped-call"
"""Tensors in a GPU's memory that another process of the same user reads where they are: CUDA's handles, as JSON.

torch expects one reader of each storage that it shares, which takes one off a count when it lets go; memory that its
sender frees earlier is kept until the count is 0. A handle that nobody opens, or that each of several ranks opens,
would keep it for ever, so the sender sets the count when it is answered, and holds the tensors until then. The reader
has copied them, and dropped its own, before it answers.
"""

import contextlib
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from bough.core.errors import RequestError
from bough.core.files import SHARED

Storage: Any = torch.UntypedStorage  # torch's types do not tell how it is shared
BEGINNING = b'{"type":"cuda_handles"'  # no safetensors begin so: it would be the length of their header
ALIGNMENT = 256  # bytes
HEADER_BYTES = 64  # of a file of torch's counts
Count = Annotated[int, msgspec.Meta(ge=0)]
INSTEAD = "send tensors of the host's memory instead (tensor.cpu())"


class SharedStorage(msgspec.Struct, frozen=True):
    """What `_share_cuda_` returns and `_new_shared_cuda` takes, but for the GPU: processes may number them in another
    order."""

    gpu: str  # its UUID
    handle: bytes
    size_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class SharedTensor(msgspec.Struct, frozen=True):
    """A contiguous part of a storage."""

    name: str
    storage: Count
    offset_bytes: Count
    dtype: str
    shape: tuple[Count, ...]


class CudaHandles(msgspec.Struct, frozen=True, tag="cuda_handles"):
    storages: tuple[SharedStorage, ...]
    tensors: tuple[SharedTensor, ...]


@contextlib.contextmanager
def shared_handles(tensors: Mapping[str, torch.Tensor], gather_below: int) -> Iterator[bytes]:
    """The handles of tensors, for `open_handles` of another process. Those with fewer bytes are gathered in one
    storage, because each handle takes time to open."""
    held = _gathered(tensors, gather_below)
    for device in {tensor.device for tensor in held.values()}:
        torch.cuda.synchronize(device)  # whatever stream has written them
    storages: dict[int, SharedStorage] = {}  # by address
    try:
        for storage in (tensor.untyped_storage() for tensor in held.values()):
            if storage.data_ptr() not in storages:
                number, *parts = Storage._share_cuda_(storage)
                storages[storage.data_ptr()] = SharedStorage(_uuid(number), *parts)
        places = {address: place for place, address in enumerate(storages)}
        placed = []
        for name, tensor in held.items():
            at = places[tensor.untyped_storage().data_ptr()], int(tensor.storage_offset()) * tensor.itemsize
            placed.append(SharedTensor(name, *at, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        yield msgspec.json.encode(CudaHandles(tuple(storages.values()), tuple(placed)))
    finally:
        for shared in storages.values():
            counts = np.memmap(SHARED / shared.counter.decode().lstrip("/"), np.int64, "r+", offset=HEADER_BYTES)
            counts[shared.counter_offset] = 0


def open_handles(content: bytes) -> dict[str, torch.Tensor]:
    """The tensors of another process. They are its memory: copy them, and let go of them before it is answered."""
    try:
        handles = msgspec.json.decode(content, type=CudaHandles)
    except msgspec.MsgspecError as error:
        raise RequestError(f"These are no handles of CUDA tensors ({error}).") from None
    gpus = {_uuid(number): number for number in range(torch.cuda.device_count())}
    storages: list[torch.UntypedStorage] = []
    for shared in handles.storages:
        gpu, *parts = msgspec.structs.astuple(shared)
        if gpu not in gpus:
            raise RequestError(f"The tensors are on the GPU {gpu}, which the engine does not see; {INSTEAD}.")
        try:
            storages.append(Storage._new_shared_cuda(gpus[gpu], *parts))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise RequestError(f"The memory of the sender cannot be opened ({reason}); {INSTEAD}.") from None
    return {tensor.name: _placed(tensor, storages) for tensor in handles.tensors}


def _placed(tensor: SharedTensor, storages: list[torch.UntypedStorage]) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype) or tensor.offset_bytes % dtype.itemsize or tensor.storage >= len(storages):
        raise RequestError(f"Tensor {tensor.name} has an unknown number format ({tensor.dtype}) or place.")
    storage = storages[tensor.storage]
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    size = torch.Size(tensor.shape).numel() * dtype.itemsize
    if tensor.offset_bytes + size > len(whole):
        raise RequestError(f"Tensor {tensor.name} ends behind the memory that was sent.")
    return whole[tensor.offset_bytes :][:size].view(dtype).view(tensor.shape)


def _gathered(tensors: Mapping[str, torch.Tensor], below: int) -> dict[str, torch.Tensor]:
    """The same tensors, each contiguous; those below that many bytes in one storage for each device."""
    held = {name: tensor.detach() for name, tensor in tensors.items()}
    small: dict[torch.device, list[str]] = {}
    for name, tensor in held.items():
        if tensor.nbytes < max(below, 1):  # an empty one has no memory to share
            small.setdefault(tensor.device, []).append(name)
        else:
            held[name] = tensor.contiguous()
    for device, names in small.items():
        starts = [0, *accumulate(-(-held[name].nbytes // ALIGNMENT) * ALIGNMENT for name in names)]
        bucket = torch.empty(max(starts[-1], ALIGNMENT), dtype=torch.uint8, device=device)
        for name, start in zip(names, starts, strict=False):
            tensor = held[name]
            held[name] = bucket[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return held


class PageMemory:
    """Memory of this process's GPU that other engines read, and theirs. To open it takes time, so that it stays open:
    until then it is not freed, even if its owner has ended."""

    def __init__(self) -> None:
        own = torch.cuda.current_device()
        others, reaches = set(range(torch.cuda.device_count())) - {own}, torch.cuda.can_device_access_peer
        self._stream, self.gpu = torch.cuda.Stream(own), _uuid(own)
        self.gpus = (self.gpu, *(_uuid(each) for each in others if reaches(own, each)))
        self._opened: dict[bytes, torch.Tensor] = {}
        self.forget = self._opened.clear

    def allocate(self, size: int) -> tuple[torch.Tensor, bytes]:
        memory = torch.empty(size, dtype=torch.uint8, device=self._stream.device)
        with shared_handles({"": memory}, 0) as handle:
            return memory, handle  # never freed, so that torch's count of its readers does not matter

    def read(self, place: bytes, into: torch.Tensor | npt.NDArray[np.uint8]) -> None:
        handle, at = msgspec.msgpack.decode(place, type=tuple[bytes, int])
        with torch.cuda.stream(self._stream):
            opened = self._opened.get(handle)
            if opened is None:
                opened = self._opened[handle] = open_handles(handle)[""]
            torch.as_tensor(into).copy_(opened[at : at + len(into)], non_blocking=True)
            self._stream.synchronize()


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)

"""Reads the head of a GGUF file: its metadata and where each tensor lies. The tensors stay on disk, memory-mapped.

The `gguf` package's own reader turns every token of the vocabulary into Python objects, which takes 4 s for 49,000
tokens and 17 s for 262,000; here arrays are stepped over and decoded when somebody asks. Formats and types are its own.
Every way in which a file can be cut short or overwritten ends in a `ModelError` that names the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bough.core.errors import ModelError
from bough.core.gguf_format import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
)
from bough.loader.locate import gguf_parts

READABLE_VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
SCALARS = {kind: np.dtype(scalar).newbyteorder("<") for kind, scalar in GGUFReader.gguf_scalar_to_np.items()}
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata, not decoded yet."""

    buffer: mmap.mmap
    kind: int
    count: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.count

    def values(self) -> list[str] | list[int] | list[float]:
        if self.kind == GGUFValueType.STRING:
            return self._strings()
        numbers = np.frombuffer(self.buffer, SCALARS[self.kind], self.count, self.start)
        decoded: list[int] | list[float] = numbers.tolist()
        return decoded

    def find(self, text: str) -> int | None:
        """The place of a string, found without decoding the others."""
        if self.kind != GGUFValueType.STRING:
            return None
        encoded = text.encode()
        entry = LENGTH.pack(len(encoded)) + encoded
        at, place = self.start, 0
        found = self.buffer.find(entry, self.start, self.end)
        while found >= 0:
            while at < found:
                at += LENGTH.size + LENGTH.unpack_from(self.buffer, at)[0]
                place += 1
            if at == found:
                return place
            found = self.buffer.find(entry, found + 1, self.end)  # those bytes were part of another string
        return None

    def _strings(self) -> list[str]:
        texts = []
        at = self.start
        for _ in range(self.count):
            begin = at + LENGTH.size
            at = begin + LENGTH.unpack_from(self.buffer, at)[0]
            texts.append(self.buffer[begin:at].decode("utf-8", errors="replace"))
        return texts


Value = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` runs from the slowest dimension to the fastest, as in torch: GGUF's reversed."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # from the beginning of the file
    nbytes: int
    buffer: mmap.mmap  # the file: of a split model, one of several


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file, or a model that is split over several. The mappings live as long as anything refers to them."""

    path: Path  # the first
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """A file; with it, the others of a split model of which it is the first."""
        file = cls._open_one(path)
        others = [cls._open_one(part) for part in _other_parts(path, file.metadata)]
        tensors = {name: info for each in (file, *others) for name, info in each.tensors.items()}
        return cls(path, file.metadata, tensors)

    @classmethod
    def _open_one(cls, path: Path) -> GgufFile:
        buffer = _map(path)
        cursor = _Cursor(path, buffer)
        try:
            metadata, infos = _read_head(cursor)
        except (struct.error, IndexError, OverflowError):
            raise ModelError(f"{path} is cut short: it ends inside its header; fetch it again.") from None
        file = cls(path, metadata, {info.name: info for info in infos})
        _check_extent(file, len(buffer))
        return file

    def raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, one row of the last dimension per row; read-only, paged in when touched."""
        data = np.frombuffer(info.buffer, np.uint8, info.nbytes, info.start)
        return data.reshape(math.prod(info.shape[:-1]), -1)

    def forget(self, info: TensorInfo) -> None:
        """Pages that were read of a tensor no longer count as this process's memory; who has its bytes may go on."""
        first = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.start + info.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            info.buffer.madvise(mmap.MADV_DONTNEED, first, length)


class _Cursor:
    """A position in the file that moves over what it reads."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.at = 0

    def scalar(self, kind: int) -> int | float | bool:
        begin = self.at
        self.skip(SCALARS[kind].itemsize)
        number: int | float | bool = np.frombuffer(self.buffer, SCALARS[kind], 1, begin)[0].item()
        return number

    def count(self) -> int:
        return int(self.scalar(GGUFValueType.UINT64))

    def text(self) -> str:
        size = self.count()
        begin = self.at
        self.skip(size)
        return self.buffer[begin : self.at].decode("utf-8", errors="replace")

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.buffer):
            raise IndexError

    def value(self) -> Value:
        kind = int(self.scalar(GGUFValueType.UINT32))
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise ModelError(f"{self.path} is damaged: its metadata holds an unknown type ({kind}); fetch it again.")
        return self.scalar(kind)

    def array(self) -> GgufArray:
        kind, count = int(self.scalar(GGUFValueType.UINT32)), self.count()
        start = self.at
        if kind == GGUFValueType.STRING:
            self.at = _end_of_strings(self.buffer, start, count)
        elif kind in SCALARS:
            self.skip(count * SCALARS[kind].itemsize)
        else:
            raise ModelError(f"{self.path} is damaged: its metadata holds an array of type {kind}; fetch it again.")
        return GgufArray(self.buffer, kind, count, start, self.at)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # mmap refuses an empty file
        raise ModelError(f"{path} is empty; fetch it again.") from None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from None


def _read_head(cursor: _Cursor) -> tuple[dict[str, Value], list[TensorInfo]]:
    if cursor.scalar(GGUFValueType.UINT32) != GGUF_MAGIC:
        raise ModelError(f"{cursor.path} is not a GGUF file: it does not begin with 'GGUF'.")
    version = int(cursor.scalar(GGUFValueType.UINT32))
    if version not in READABLE_VERSIONS:
        raise ModelError(f"{cursor.path} is GGUF version {version} (or big-endian); versions 2 and 3 can be read.")
    tensor_count, metadata_count = cursor.count(), cursor.count()
    metadata: dict[str, Value] = {}
    for _ in range(metadata_count):
        key = cursor.text()
        metadata[key] = cursor.value()
    found = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{cursor.path} is damaged: general.alignment is {alignment!r}; fetch it again.")
    data_start = -(-cursor.at // alignment) * alignment
    return metadata, [replace(info, start=info.start + data_start) for info in found]


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    """`start` counts from the beginning of the tensor data, which is known only after the last of these."""
    name = cursor.text()
    dimensions = int(cursor.scalar(GGUFValueType.UINT32))
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path} is damaged: tensor {name!r} has {dimensions} dimensions; fetch it again.")
    shape = tuple(cursor.count() for _ in range(dimensions))[::-1]
    while len(shape) > 1 and shape[0] == 1:  # tensors are padded with such dimensions, some in the file itself
        shape = shape[1:]
    if 0 in shape:
        raise ModelError(f"{cursor.path} is damaged: tensor {name!r} is empty; fetch it again.")
    number = int(cursor.scalar(GGUFValueType.UINT32))
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        text = f"{cursor.path}: tensor {name!r} has the unknown type {number}; a newer `gguf` package may know it."
        raise ModelError(text) from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        text = f"{cursor.path} is damaged: rows of {name!r} hold {shape[-1]} values, not a multiple of {block}"
        raise ModelError(f"{text}; fetch it again.")
    return TensorInfo(name, shape, kind, cursor.count(), math.prod(shape) // block * block_bytes, cursor.buffer)


def _end_of_strings(buffer: mmap.mmap, at: int, count: int) -> int:
    """Steps over strings without decoding them: the loop that makes large vocabularies cheap."""
    unpack, size = LENGTH.unpack_from, LENGTH.size
    for _ in range(count):
        at += size + unpack(buffer, at)[0]
    if at > len(buffer):
        raise IndexError
    return at


def _other_parts(path: Path, metadata: Mapping[str, Value]) -> Sequence[Path]:
    count, parts = metadata.get("split.count", 1) or 1, gguf_parts(path)
    if count != len(parts) or metadata.get("split.no", 0) != 0:
        raise ModelError(
            f"{path} is one of {count} files of a split GGUF; give the first, whose name ends in "
            f"-00001-of-{count:05}.gguf, with the others beside it."
        )
    return parts[1:]


def _check_extent(file: GgufFile, length: int) -> None:
    """Finds a download that stopped early now, not when its last layer is read."""
    for info in file.tensors.values():
        if info.start + info.nbytes > length:
            raise ModelError(
                f"{file.path} is cut short: it has {length} bytes, but tensor {info.name!r} ends at byte "
                f"{info.start + info.nbytes}; fetch it again."
            )

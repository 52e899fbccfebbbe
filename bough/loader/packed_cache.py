"""Packed weights on disk, so that the next start maps them instead of packing, and engines on one machine share them.

One file for each model, way of quantising and version of the packing, in `<home>/packed`. It is written beside its
place and renamed into it, so that any number of engines may write at once and a reader never sees half a file. A file
that cannot be used counts as absent; one that cannot be written is a line in the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bough.kernels.quant_linear.packed import LINE, Format, PackedWeight
from bough.native.build import library_name

log = logging.getLogger(__name__)

MAGIC = b"BOUGHPK1"
HEAD = struct.Struct("<8sQ")  # the magic word, and the length of the JSON that follows
SAMPLE = 1 << 20


class PackedCache:
    """The packed weights of one model: those found on disk, and those made since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = _read(path)
        self._made: dict[str, PackedWeight] = {}

    def get(self, name: str, outputs: int, inputs: int) -> PackedWeight | None:
        """The weight of that name, if it is there in this shape."""
        weight = self._found.get(name)
        return weight if weight is not None and (weight.n, weight.k) == (outputs, inputs) else None

    def add(self, name: str, weight: PackedWeight) -> None:
        """Notes a weight to be saved. Floats are not: mapping them gains nothing over the checkpoint itself."""
        if not weight.format.is_float:
            self._made[name] = weight

    def save(self) -> None:
        """Writes all weights, if some were made, and deletes what older versions left of this model."""
        if not self._made:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".packing-", delete=False) as file:
                _write(file.fileno(), self._found | self._made)
            made = Path(file.name)
            made.chmod(0o644)  # for engines of other users too
            made.replace(self._path)
        except OSError as error:
            log.warning("packed weights are not kept for the next start: %s", error.strerror or error)
            return
        for other in self._path.parent.glob(f"{self._path.name.partition('.')[0]}.*"):
            if other != self._path:
                other.unlink(missing_ok=True)


def cache_path(home: Path, weights: Sequence[Path], quantization: str) -> Path:
    """Where the packed weights of these files are kept. The name's first part is the model, its second the packing."""
    model = hashlib.sha256(quantization.encode())
    for path in weights:
        status = path.stat()
        model.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
        with path.open("rb") as file:
            model.update(file.read(SAMPLE))
    packing = library_name().rpartition("-")[2].removesuffix(".so")
    return home / "packed" / f"{model.hexdigest()[:24]}.{packing}.bin"


def _read(path: Path) -> dict[str, PackedWeight]:
    """Maps a file; its bytes are read when they are used."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        magic, length = HEAD.unpack(bytes(data[: HEAD.size]))
        if magic != MAGIC:
            return {}
        entries = json.loads(bytes(data[HEAD.size : HEAD.size + length]))
        return {name: _entry(data, *numbers) for name, numbers in entries.items()}
    except (OSError, ValueError, struct.error):
        return {}


def _entry(data: npt.NDArray[np.uint8], form: int, n: int, k: int, offset: int, size: int) -> PackedWeight:
    if offset + size > len(data):
        raise ValueError("the file was cut short")
    return PackedWeight(Format(form), n, k, data[offset : offset + size])


def _write(descriptor: int, weights: dict[str, PackedWeight]) -> None:
    # The offsets stand in the JSON whose length they depend on: it is padded to a length that is surely enough.
    room = _aligned(HEAD.size + 256 * (len(weights) + 1) + sum(map(len, weights)))
    offset, entries = room, {}
    for name, weight in weights.items():
        entries[name] = (int(weight.format), weight.n, weight.k, offset, weight.blob.nbytes)
        offset = _aligned(offset + weight.blob.nbytes)
    text = json.dumps(entries).encode().ljust(room - HEAD.size)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(HEAD.pack(MAGIC, len(text)) + text)
        for piece in _pieces(weights.values()):
            file.write(piece)


def _pieces(weights: Iterable[PackedWeight]) -> Iterable[bytes | memoryview]:
    for weight in weights:
        yield np.ascontiguousarray(weight.blob).data
        yield bytes(_aligned(weight.blob.nbytes) - weight.blob.nbytes)


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE

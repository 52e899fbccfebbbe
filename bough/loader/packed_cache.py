"""Packed weights on disk, so that the next start maps them instead of packing, and engines on one machine share them.

One file for each model, way of quantising, kind of CPU and version of the packing, in `<home>/packed`. It is written
beside its place and renamed into it, so that any number of engines may write at once and a reader never sees half a
file. A file that cannot be used counts as absent; one that cannot be written is a line in the log.
"""

import contextlib
import hashlib
import json
import logging
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bough.kernels.quant_linear.packed import LINE, Format, PackedWeight, packed_bytes
from bough.native.build import library_name

log = logging.getLogger(__name__)

MAGIC = b"BOUGHPK3"
HEAD = struct.Struct("<8sQQQ")  # the magic word, when it was written (s), the length of the JSON behind, its checksum
UNFINISHED = ".packing-"  # how the names of files begin that are being written
ABANDONED_S = 3600.0  # nobody writes for so long
SAMPLES = 32  # places of a checkpoint that are looked at to know it again: all of it would take seconds
SAMPLE_BYTES = 1 << 15
CHECKED_BYTES = 4096  # at each place that is looked at of a weight whose file nobody has touched


class PackedCache:
    """The packed weights of one model: those found on disk, and those made since."""

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        """Without `keep` nothing is written."""
        self._path, self._keep = path, keep
        self._found = _read(path)
        self._made: dict[str, PackedWeight] = {}

    def get(self, name: str, outputs: int, inputs: int) -> PackedWeight | None:
        """The weight of that name, if it is there in this shape."""
        weight = self._found.get(name)
        return weight if weight is not None and (weight.n, weight.k) == (outputs, inputs) else None

    def add(self, name: str, weight: PackedWeight) -> None:
        """Notes a weight to be saved. Float32 is not: it is the widest form of what the checkpoint has, up to eight
        times as large."""
        if self._keep and weight.format is not Format.F32:
            self._made[name] = weight

    def save(self) -> None:
        """Writes all weights, if some were made, and deletes what older versions left of this model. From then on `get`
        gives those on disk, which other engines share."""
        if not self._made:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path, self._found | self._made)
        except OSError as error:
            log.warning("packed weights are not kept for the next start: %s", error.strerror or error)
            return
        self._found, self._made = _read(self._path), {}
        _sweep(self._path)


def cache_path(home: Path, weights: Sequence[Path], quantization: str, cpu: str) -> Path:
    """Where the packed weights of these files are kept for this kind of CPU. The name's last part is the packing's
    version."""
    model = hashlib.sha256(quantization.encode())
    for path in weights:
        status = path.stat()
        model.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(status.st_size * sample // SAMPLES)
                model.update(file.read(SAMPLE_BYTES))
    packing = library_name().rpartition("-")[2].removesuffix(".so")
    return home / "packed" / f"{model.hexdigest()[:24]}.{cpu}.{packing}.bin"


# ---- reading


def _read(path: Path) -> dict[str, PackedWeight]:
    """Maps a file; its bytes are read when they are used. One that was touched since it was written is read whole."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        magic, written_s, length, checksum = HEAD.unpack(bytes(data[: HEAD.size]))
        text = bytes(data[HEAD.size : HEAD.size + length])
        if magic != MAGIC or zlib.crc32(text) != checksum:
            return {}
        untouched = path.stat().st_mtime_ns == written_s * 10**9
        return {name: _entry(data, untouched, *numbers) for name, numbers in json.loads(text).items()}
    except (OSError, ValueError, struct.error):
        return {}


def _entry(
    data: npt.NDArray[np.uint8], untouched: bool, form: int, n: int, k: int, offset: int, sampled: int, whole: int
) -> PackedWeight:
    size = packed_bytes(Format(form), n, k)
    blob = data[offset : offset + size]
    if len(blob) < size or (_sampled(blob) != sampled if untouched else zlib.crc32(blob.data) != whole):
        raise ValueError("the file was cut short or damaged")
    return PackedWeight(Format(form), n, k, blob)


def _sampled(blob: npt.NDArray[np.uint8]) -> int:
    """The checksum of a few places: a file that a failing disk or machine has left half written shows at one of them,
    and reading all of it would cost the start what mapping it has saved."""
    last = max(0, len(blob) - CHECKED_BYTES)
    checksum = 0
    for start in (0, last // 3, last * 2 // 3, last):
        checksum = zlib.crc32(blob[start : start + CHECKED_BYTES].data, checksum)
    return checksum


# ---- writing


def _replace(path: Path, weights: dict[str, PackedWeight]) -> None:
    """Puts a file with these weights in the place of the one that is there; leaves nothing behind where that fails."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as file:
        made, written_s = Path(file.name), int(time.time())
        try:
            for piece in _content(weights, written_s):
                file.write(piece)
            file.flush()
            os.utime(file.fileno(), (written_s, written_s))  # whoever writes to it later changes that
            os.fsync(file.fileno())  # else a machine that fails may leave the name without the content
            made.chmod(0o644)  # for engines of other users too
            made.replace(path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise


def _content(weights: dict[str, PackedWeight], written_s: int) -> Iterator[bytes | memoryview]:
    # The offsets stand in the JSON whose length they depend on: it is padded to a length that is surely enough.
    room = _aligned(HEAD.size + 256 * (len(weights) + 1) + sum(map(len, weights)))
    offset, entries = room, {}
    for name, weight in weights.items():
        blob = np.ascontiguousarray(weight.blob)
        entries[name] = (int(weight.format), weight.n, weight.k, offset, _sampled(blob), zlib.crc32(blob.data))
        offset = _aligned(offset + weight.blob.nbytes)
    text = json.dumps(entries).encode().ljust(room - HEAD.size)
    yield HEAD.pack(MAGIC, written_s, len(text), zlib.crc32(text)) + text
    for weight in weights.values():
        yield np.ascontiguousarray(weight.blob).data
        yield bytes(_aligned(weight.blob.nbytes) - weight.blob.nbytes)


def _sweep(path: Path) -> None:
    """Deletes what older versions left of the model, and what processes left that were killed while they wrote."""
    older = [other for other in path.parent.glob(f"{path.name.rsplit('.', 2)[0]}.*") if other != path]
    for leftover in (*older, *path.parent.glob(f"{UNFINISHED}*")):
        with contextlib.suppress(OSError):  # another engine was quicker, or another user owns it
            if leftover in older or leftover.stat().st_mtime < time.time() - ABANDONED_S:
                leftover.unlink()


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE

"""Packed weights survive a restart, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bough.kernels.quant_linear.packed import LINE, Format, PackedWeight, packed_bytes
from bough.loader import packed_cache
from bough.loader.packed_cache import HEAD, PackedCache, cache_path
from bough.native.library import load_library


def weight(seed: int, outputs: int = 4, form: Format = Format.Q8) -> PackedWeight:
    if load_library() is None:  # it knows how large they are
        pytest.skip("the CPU kernels are not compiled")
    size = packed_bytes(form, outputs, 32)
    return PackedWeight(form, outputs, 32, np.random.default_rng(seed).integers(1, 255, size, dtype=np.uint8))


def saved(path: Path, **weights: PackedWeight) -> None:
    cache = PackedCache(path)
    for name, made in weights.items():
        cache.add(name, made)
    cache.save()


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "packed" / "model.one.bin"
    saved(path, first=weight(1), second=weight(2, 40))
    cache = PackedCache(path)
    for name, expected in (("first", weight(1)), ("second", weight(2, 40))):
        found = cache.get(name, expected.n, 32)
        assert found is not None and found.format is Format.Q8
        assert found.blob.tobytes() == expected.blob.tobytes()
        assert found.blob.ctypes.data % LINE == 0
    assert cache.get("first", 4, 64) is None
    assert cache.get("third", 4, 32) is None


def test_all_but_float32_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.one.bin"
    saved(path, plain=weight(1, form=Format.F32))
    assert not path.exists()
    saved(path, plain=weight(1, form=Format.F32), half=weight(2, form=Format.BF16))
    cache = PackedCache(path)
    assert cache.get("plain", 4, 32) is None and cache.get("half", 4, 32) is not None


@pytest.mark.parametrize(
    "damage", ["cut", "cut head", "other", "empty", "list", "zeros behind", "bit of the head", "bit of a weight"]
)
def test_a_damaged_file_counts_as_absent_and_is_replaced(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.one.bin"
    saved(path, first=weight(1, 4000))
    content = path.read_bytes()
    text = b"[1, 2]"
    path.write_bytes(
        {
            "cut": content[:-100],
            "cut head": content[:40],
            "other": b"x" * len(content),
            "empty": b"",
            "list": HEAD.pack(packed_cache.MAGIC, 0, len(text), 0) + text,
            "zeros behind": content[: len(content) // 2].ljust(len(content), b"\0"),
            "bit of the head": content[:40] + bytes([content[40] ^ 1]) + content[41:],
            "bit of a weight": content[:-9000] + bytes([content[-9000] ^ 1]) + content[-8999:],
        }[damage]
    )
    assert PackedCache(path).get("first", 4000, 32) is None
    saved(path, first=weight(1, 4000))
    assert path.read_bytes()[HEAD.size :] == content[HEAD.size :]


def test_a_file_that_was_copied_is_used_too(tmp_path: Path) -> None:
    path, copy = tmp_path / "model.one.bin", tmp_path / "other.one.bin"
    saved(path, first=weight(1, 4000))
    copy.write_bytes(path.read_bytes())
    found = PackedCache(copy).get("first", 4000, 32)
    assert found is not None and found.blob.tobytes() == weight(1, 4000).blob.tobytes()


def test_a_file_that_nobody_has_touched_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.one.bin"
    saved(path, first=weight(1, 40_000))
    read = []

    def counting(data: Any, before: int = 0) -> int:
        read.append(len(data))
        return zlib.crc32(data, before)

    monkeypatch.setattr(packed_cache, "zlib", SimpleNamespace(crc32=counting))
    assert PackedCache(path).get("first", 40_000, 32) is not None
    assert sum(read) < weight(1, 40_000).blob.nbytes / 10


WRITER = """
import sys
from pathlib import Path
from tests.loader.test_loader_packed_cache import saved, weight
print("ready", flush=True)
sys.stdin.read()
for _ in range(20):
    saved(Path(sys.argv[1]), first=weight(1, 20_000), second=weight(2, 20_000))
"""


def start_writer(path: Path) -> subprocess.Popen[bytes]:
    """One that waits for the end of its input."""
    root, command = Path(__file__).parents[2], [sys.executable, "-c", WRITER, str(path)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    writer = subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    return writer


def test_engines_may_write_at_once_while_others_read(tmp_path: Path) -> None:
    path = tmp_path / "model.one.bin"
    writers = [start_writer(path) for _ in range(2)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    expected = {"first": weight(1, 20_000).blob.tobytes(), "second": weight(2, 20_000).blob.tobytes()}
    while any(writer.poll() is None for writer in writers):
        there, cache = path.exists(), PackedCache(path)
        for name, content in expected.items():
            found = cache.get(name, 20_000, 32)
            assert found is not None or not there
            assert found is None or found.blob.tobytes() == content
    assert [writer.wait() for writer in writers] == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # nothing is left beside it


def test_what_was_saved_is_used_from_the_disk(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path / "model.one.bin")
    cache.add("first", weight(1))
    assert cache.get("first", 4, 32) is None
    cache.save()
    found = cache.get("first", 4, 32)
    assert found is not None and found.blob.tobytes() == weight(1).blob.tobytes()
    assert not found.blob.flags.writeable  # it is mapped


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache.os, "fsync", full)
    saved(tmp_path / "model.one.bin", first=weight(1))
    assert "No space left" in caplog.text and not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_when_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / ".packing-old", tmp_path / ".packing-young"
    for file in (old, young):
        file.write_text("half")
    os.utime(old, (0, 0))
    saved(tmp_path / "model.one.bin", first=weight(1))
    assert young.exists() and not old.exists()


def test_another_version_of_the_packing_replaces_the_file(tmp_path: Path) -> None:
    saved(tmp_path / "model.one.bin", first=weight(1))
    saved(tmp_path / "other.one.bin", first=weight(1))
    saved(tmp_path / "model.two.bin", first=weight(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.two.bin", "other.one.bin"]


def test_files_for_other_cpus_stay(tmp_path: Path) -> None:
    """A home may lie on a disk that machines share."""
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"some")
    places = [cache_path(tmp_path, [weights], "auto", cpu) for cpu in ("x86_64-3", "x86_64-1b")]
    for place in places:
        saved(place, first=weight(1))
    assert len(set(places)) == 2 and all(place.exists() for place in places)


def test_the_place_depends_on_the_file_and_the_way_of_quantising(tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"some")
    places = {cache_path(tmp_path, [weights], "auto", "cpu"), cache_path(tmp_path, [weights], "int4", "cpu")}
    assert len(places) == 2 and cache_path(tmp_path, [weights], "auto", "cpu") in places
    weights.write_bytes(b"more")
    assert cache_path(tmp_path, [weights], "auto", "cpu") not in places


def test_weights_that_differ_only_behind_their_beginning_are_told_apart(tmp_path: Path) -> None:
    """Images and reproducible builds give all files the same time."""
    weights, size = tmp_path / "weights.gguf", 8 << 20
    places = set()
    for end in (b"a", b"b"):
        weights.write_bytes(b"same".ljust(size // 2, b"\0") + end * (size // 2))
        os.utime(weights, (1, 1))
        places.add(cache_path(tmp_path, [weights], "auto", "cpu"))
    assert len(places) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "packed").write_text("a file stands where the folder should be")
    saved(tmp_path / "packed" / "model.one.bin", first=weight(1))
    assert "not kept" in caplog.text

"""Packed weights survive a restart, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bough.kernels.quant_linear.packed import LINE, Format, PackedWeight, packed_bytes
from bough.loader import packed_cache
from bough.loader.packed_cache import HEAD, PackedCache, cache_path


def weight(seed: int, outputs: int = 4, form: Format = Format.Q8) -> PackedWeight:
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


@pytest.mark.parametrize("damage", ["cut", "cut head", "other", "empty", "list", "zeros behind", "bit of the head"])
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
            "list": HEAD.pack(packed_cache.MAGIC, len(text), 0) + text,
            "zeros behind": content[: len(content) // 2].ljust(len(content), b"\0"),
            "bit of the head": content[:30] + bytes([content[30] ^ 1]) + content[31:],
        }[damage]
    )
    assert PackedCache(path).get("first", 4000, 32) is None
    saved(path, first=weight(1, 4000))
    assert path.read_bytes() == content


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


def test_the_place_depends_on_the_file_and_the_way_of_quantising(tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"some")
    places = {cache_path(tmp_path, [weights], "auto"), cache_path(tmp_path, [weights], "int4")}
    assert len(places) == 2 and cache_path(tmp_path, [weights], "auto") in places
    weights.write_bytes(b"more")
    assert cache_path(tmp_path, [weights], "auto") not in places


def test_weights_that_differ_only_behind_their_beginning_are_told_apart(tmp_path: Path) -> None:
    """Images and reproducible builds give all files the same time."""
    weights, size = tmp_path / "weights.gguf", 8 << 20
    places = set()
    for end in (b"a", b"b"):
        weights.write_bytes(b"same".ljust(size // 2, b"\0") + end * (size // 2))
        os.utime(weights, (1, 1))
        places.add(cache_path(tmp_path, [weights], "auto"))
    assert len(places) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "packed").write_text("a file stands where the folder should be")
    saved(tmp_path / "packed" / "model.one.bin", first=weight(1))
    assert "not kept" in caplog.text

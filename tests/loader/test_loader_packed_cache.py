"""Packed weights survive a restart, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bough.kernels.quant_linear.packed import LINE, Format, PackedWeight
from bough.loader.packed_cache import PackedCache, cache_path


def weight(seed: int, size: int = 200, form: Format = Format.Q8) -> PackedWeight:
    return PackedWeight(form, 4, 32, np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8))


def saved(path: Path, **weights: PackedWeight) -> None:
    cache = PackedCache(path)
    for name, made in weights.items():
        cache.add(name, made)
    cache.save()


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "packed" / "model.one.bin"
    saved(path, first=weight(1), second=weight(2, 64))
    cache = PackedCache(path)
    for name, expected in (("first", weight(1)), ("second", weight(2, 64))):
        found = cache.get(name, 4, 32)
        assert found is not None and found.format is Format.Q8
        assert found.blob.tobytes() == expected.blob.tobytes()
        assert found.blob.ctypes.data % LINE == 0
    assert cache.get("first", 4, 64) is None
    assert cache.get("third", 4, 32) is None


def test_floats_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.one.bin"
    saved(path, plain=weight(1, form=Format.F32))
    assert not path.exists()


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_damaged_file_counts_as_absent(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.one.bin"
    saved(path, first=weight(1))
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-100], "other": b"x" * len(content), "empty": b""}[damage])
    assert PackedCache(path).get("first", 4, 32) is None


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


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "packed").write_text("a file stands where the folder should be")
    saved(tmp_path / "packed" / "model.one.bin", first=weight(1))
    assert "not kept" in caplog.text

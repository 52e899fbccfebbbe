"""Loading packed weights: made once, then taken from the disk, unless they would be packed in another way by now."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bough.kernels.quant_linear.packed import FillingWeight, Format, PackedWeight
from bough.layers.weights import WeightSlot
from bough.loader.load import load_weights
from bough.loader.packed_cache import PackedCache
from bough.loader.source import SafetensorsSource
from tests.native.lone_products import dequantize_row

VALUES = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).half()


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsSource:
    save_file({"a.weight": VALUES}, tmp_path / "model.safetensors")
    return SafetensorsSource([tmp_path / "model.safetensors"])


def load(source: SafetensorsSource, cache: Path, quantization: str) -> PackedWeight:
    filling = FillingWeight(40, 64, quantization)
    slot = WeightSlot("a.weight", torch.empty(40, 64, device="meta"), (), packing=filling)
    load_weights([slot], source, progress=False, device=torch.device("cpu"), cache=PackedCache(cache))
    return filling.weight


def test_what_was_packed_comes_from_the_disk(
    library: ctypes.CDLL, source: SafetensorsSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(source, tmp_path / "model.one.bin", "auto")
    monkeypatch.setattr(source, "read_stored", None)  # nobody asks for it again
    again = load(source, tmp_path / "model.one.bin", "auto")
    for weight in (first, again):
        assert weight.format is Format.F16 and not weight.blob.flags.writeable  # both are mapped
        assert torch.equal(dequantize_row(weight, 39), VALUES[39].float())


def test_what_would_be_packed_otherwise_is_made_anew(
    library: ctypes.CDLL, source: SafetensorsSource, tmp_path: Path
) -> None:
    """As after an update that keeps weights in another format than the one before it."""
    path = tmp_path / "model.one.bin"
    assert load(source, path, "int8").format is Format.Q8
    assert load(source, path, "auto").format is Format.F16
    found = PackedCache(path).get("a.weight", 40, 64)
    assert found is not None and found.format is Format.F16
    assert load(source, path, "none").format is Format.F32

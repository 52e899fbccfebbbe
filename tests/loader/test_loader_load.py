from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.layers.weights import WeightSlot
from bough.loader import load
from bough.loader.config import read_config
from bough.loader.load import check_biases, check_ends, load_weights, open_source
from bough.loader.locate import ModelFiles
from bough.loader.source import DummySource, SafetensorsSource, TensorSource

CPU = torch.device("cpu")
MATRIX = torch.arange(40, dtype=torch.float32).view(10, 4)


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsSource:
    save_file({"m": MATRIX, "v": torch.arange(4.0)}, tmp_path / "model.safetensors")
    return SafetensorsSource([tmp_path / "model.safetensors"])


@pytest.mark.parametrize("piece", [1, 12, 1 << 20])
def test_each_slot_gets_its_part_in_its_own_type(
    source: SafetensorsSource, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "PIECE_VALUES", piece)
    fused = torch.full((8, 4), -1.0, dtype=torch.bfloat16)
    columns, vector = torch.empty(10, 2), torch.empty(4)
    slots = [
        WeightSlot("m", fused[2:7], (slice(5, 10),)),
        WeightSlot("m", columns, (slice(None), slice(2, 4))),
        WeightSlot("v", vector),
    ]
    load_weights(iter(slots), source, progress=True, device=CPU)
    assert torch.equal(fused[2:7], MATRIX[5:10].bfloat16())
    assert (fused[:2] == -1).all() and (fused[7:] == -1).all()
    assert torch.equal(columns, MATRIX[:, 2:])
    assert torch.equal(vector, torch.arange(4.0))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(
    source: SafetensorsSource, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", screen)
    load_weights([WeightSlot("v", torch.empty(4))], source, progress=True, device=CPU)
    assert ("Loading weights: 100%" in screen.getvalue()) == terminal
    assert terminal or not screen.getvalue()


def test_missing_tensor_is_found_before_anything_is_copied(source: SafetensorsSource) -> None:
    target = torch.full((4,), -1.0)
    slots = [WeightSlot("v", target), WeightSlot("lm_head.weight", torch.empty(1)), WeightSlot("x", torch.empty(1))]
    with pytest.raises(ModelError, match=r"lacks 2 of the 3 tensors .* lm_head\.weight"):
        load_weights(slots, source, progress=False, device=CPU)
    assert (target == -1).all()


@pytest.mark.parametrize(
    ("shape", "index", "text"),
    [
        ((10, 5), (), r"Tensor m has shape \[10, 4\], the model expects \[10, 5\]"),
        ((8, 4), (slice(4, 12),), r"Tensor m has shape \[10, 4\], \[4:12\] of it, the model expects \[8, 4\]"),
        ((10,), (), r"the model expects \[10\]"),
        ((10, 4, 1), (slice(None),) * 3, r"the model expects \[10, 4, 1\]"),
    ],
)
def test_wrong_shapes_are_spelled_out(
    source: SafetensorsSource, shape: tuple[int, ...], index: tuple[slice, ...], text: str
) -> None:
    with pytest.raises(ModelError, match=text):
        load_weights([WeightSlot("m", torch.empty(shape), index)], source, progress=False, device=CPU)


def test_what_is_read_of_a_tensor_goes_to_its_end(source: SafetensorsSource) -> None:
    parts = [WeightSlot("m", torch.empty(rows.stop - rows.start, 4), (rows,)) for rows in (slice(4, 10), slice(0, 4))]
    check_ends([*parts, WeightSlot("v", torch.empty(4))], source)
    with pytest.raises(ModelError, match=r"Tensor m has shape \[10, 4\], the model expects \[4, 4\]; the weights and"):
        check_ends(parts[1:], source)


def test_a_bias_that_no_layer_adds_must_be_zero() -> None:
    """Zeros are what tools for quantisation write where a layer has none."""
    ones, bias = torch.ones(2), torch.zeros(2)
    source = TensorSource({"a.weight": MATRIX, "a.bias": bias, "b.bias": ones, "c.bias": ones})
    slots = [WeightSlot("a.weight", torch.empty(10, 4)), WeightSlot("b.bias", torch.empty(2))]
    check_biases(slots, source)
    bias[1] = 1e-3
    with pytest.raises(ModelError, match=r"Tensor a\.bias has no place in this model"):
        check_biases(slots, source)


def test_sources_by_format(source: SafetensorsSource, tmp_path: Path, tiny_config: ModelConfig) -> None:
    files = ModelFiles("tiny", tmp_path, safetensors=(tmp_path / "model.safetensors",))
    for load_format in ("auto", "safetensors"):
        opened = open_source(files, tiny_config, load_format)
        assert sorted(opened.names()) == sorted(source.names())
        assert all(torch.equal(opened.read(name), source.read(name)) for name in source.names())
    assert isinstance(open_source(files, tiny_config, "dummy"), DummySource)
    with pytest.raises(ModelError, match=r"holds no gguf weights.*--load-format dummy"):
        open_source(files, tiny_config, "gguf")
    with pytest.raises(ModelError, match=r"holds no weights"):
        open_source(replace(files, safetensors=()), tiny_config)


def test_smollm2_has_every_tensor_its_configuration_calls_for(smollm2: Path) -> None:
    files = ModelFiles("smollm2", smollm2.parent, gguf=smollm2)
    config = read_config(files)
    source = open_source(files, config)
    expected = DummySource(config)
    assert {name: source.shape(name) for name in source.names()} == {
        name: expected.shape(name) for name in expected.names()
    }
    name = "model.layers.29.self_attn.q_proj.weight"
    target = torch.empty(64, 576)
    load_weights([WeightSlot(name, target, (slice(64, 128),))], source, progress=False, device=CPU)
    assert torch.equal(target, source.read(name)[64:128])
    assert 0.01 < target.std() < 1.0


def test_pickled_weights_are_named(tmp_path: Path, tiny_config: ModelConfig) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"holds no weights; save pytorch_model\.bin as safetensors"):
        open_source(ModelFiles("tiny", tmp_path), tiny_config)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.loader.load import open_source
from bough.loader.locate import ModelFiles
from bough.loader.source import DUMMY_BLOCK, DummySource, NamedSource, SafetensorsSource, TensorSource
from bough.models.names import Stored

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def weights() -> torch.Tensor:
    return torch.arange(24, dtype=torch.bfloat16).view(6, 4)


def test_safetensors_reads_wholes_and_parts(tmp_path: Path, weights: torch.Tensor) -> None:
    save_file({NAME: weights}, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "b.safetensors")
    source = SafetensorsSource([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert sorted(source.names()) == [NAME, "model.norm.weight"]
    assert source.shape(NAME) == (6, 4)
    assert torch.equal(source.read(NAME), weights)
    assert torch.equal(source.read(NAME, (slice(2, 5),)), weights[2:5])
    assert torch.equal(source.read(NAME, (slice(None), slice(1, 3))), weights[:, 1:3])
    assert torch.equal(source.read("model.norm.weight", (slice(1, 2),)), torch.ones(1))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_nested_language_model_gets_its_plain_names(
    tmp_path: Path, weights: torch.Tensor, prefix: str, tiny_config: ModelConfig
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({f"{prefix}norm.weight": weights, "vision_tower.x": weights.clone()}, path)
    gemma = replace(tiny_config, architecture="Gemma3ForCausalLM")
    source = open_source(ModelFiles("tiny", tmp_path, safetensors=(path,)), gemma)
    assert sorted(source.names()) == ["model.norm.weight", "vision_tower.x"]
    assert torch.equal(source.read("model.norm.weight"), weights)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_safetensors_is_named(tmp_path: Path, weights: torch.Tensor, keep: int) -> None:
    path = tmp_path / "a.safetensors"
    save_file({NAME: weights}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"a\.safetensors is damaged or cut short"):
        SafetensorsSource([path])


def test_dummy_weights_are_the_same_for_the_same_name(tiny_config: ModelConfig) -> None:
    first, second = DummySource(tiny_config), DummySource(tiny_config)
    assert torch.equal(first.read(NAME), second.read(NAME))
    assert not torch.equal(first.read(NAME), first.read("model.layers.1.mlp.up_proj.weight"))
    assert first.read(NAME).std() == pytest.approx(0.02, rel=0.1)


def test_dummy_parts_are_parts_of_the_whole(tiny_config: ModelConfig) -> None:
    large = replace(tiny_config, vocab_size=2 * DUMMY_BLOCK // 64 + 3)
    source, name = DummySource(large), "model.embed_tokens.weight"
    whole = source.read(name)
    assert whole.shape == (large.vocab_size, 64)
    rows = slice(DUMMY_BLOCK // 64 - 1, DUMMY_BLOCK // 64 + 7)
    assert torch.equal(source.read(name, (rows, slice(8, 16))), whole[rows, 8:16])
    assert len(whole.unique(dim=0)) == large.vocab_size  # equal rows would tie every comparison of logits


def test_dummy_norms_are_near_one_as_the_model_sees_them(tiny_config: ModelConfig) -> None:
    plain = DummySource(tiny_config).read("model.norm.weight")
    shifted = DummySource(replace(tiny_config, norm_plus_one=True)).read("model.norm.weight")
    assert torch.allclose(plain, shifted + 1)
    assert (plain - 1).abs().max() < 0.2


def test_dummy_names_follow_the_configuration(tiny_config: ModelConfig) -> None:
    names = set(DummySource(tiny_config, torch.bfloat16).names())
    assert "lm_head.weight" not in names
    full = replace(
        tiny_config, architecture="Gemma3ForCausalLM", tied_embeddings=False, qkv_bias=True, mlp_bias=True, qk_norm=True
    )
    added = set(DummySource(full).names()) - names
    assert {name.replace("layers.1", "layers.0") for name in added} == {
        "lm_head.weight",
        *(f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"),
        *(f"model.layers.0.self_attn.{part}_norm.weight" for part in "qk"),
        *(f"model.layers.0.mlp.{part}_proj.bias" for part in ("gate", "up", "down")),
        *(f"model.layers.0.{place}_feedforward_layernorm.weight" for place in ("pre", "post")),
    }
    assert DummySource(tiny_config, torch.bfloat16).read(NAME).dtype == torch.bfloat16


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_of_several_must_be_read_to_its_end(transposed: bool) -> None:
    rows = torch.zeros(10, 4)
    held = TensorSource({"qkv": rows.T if transposed else rows})
    parts = {
        name: Stored("qkv", held, transposed) for name, held in (("q", slice(0, 4)), ("k", tuple(range(8, 3, -1))))
    }
    with pytest.raises(ModelError, match=r"Tensor qkv has shape \[(10, 4|4, 10)\], .* expects 9 instead of the 10;"):
        NamedSource(held, parts)
    NamedSource(held, parts | {"v": Stored("qkv", slice(9, 10), transposed)})

"""Checkpoint names: renamed, fused, interleaved and transposed tensors are read as the model has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bough.core.model_config import ModelConfig, RecurrentConfig, RopeConfig
from bough.loader.source import NamedSource, SafetensorsSource
from bough.models.names import Names, Piece, find_tensors, fused, interleaved, nested, pairs_apart, planes
from bough.models.registry import find_family

CONFIG = ModelConfig("LlamaForCausalLM", 8, 12, 2, 4, 2, 2, 10, 64, 1e-5, RopeConfig(10000.0))


def named(tmp_path: Path, names: Names, tensors: dict[str, torch.Tensor]) -> NamedSource:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    source = SafetensorsSource([tmp_path / "a.safetensors"])
    return NamedSource(source, find_tensors(names, source.names(), keep_others=True))


def check(source: NamedSource, name: str, expected: torch.Tensor) -> None:
    """Wholes, bands and parts, as floats and as they are stored."""
    assert source.shape(name) == tuple(expected.shape)
    assert torch.equal(source.read(name), expected)
    assert torch.equal(source.read(name, (slice(1, 3),)), expected[1:3])
    if expected.dim() == 2:
        assert torch.equal(source.read(name, (slice(1, 4), slice(2, 5))), expected[1:4, 2:5])
        rows, kind = source.read_stored(name, (slice(1, 4),))
        assert kind == source.stored_type(name)
        assert np.array_equal(rows.view(np.float32), expected[1:4].numpy())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_fused_modules_are_told_apart(tmp_path: Path, transposed: bool, groups: int) -> None:
    parts = [torch.randn(groups, rows, 6) for rows in (4, 2, 2)]
    biases = [torch.randn(groups, rows) for rows in (4, 2, 2)]
    stored, bias = torch.cat(parts, dim=1).flatten(0, 1), torch.cat(biases, dim=1).flatten()
    names = [f"model.layers.*.self_attn.{part}_proj" for part in "qkv"]
    source = named(
        tmp_path,
        {"h.*.c_attn": fused(names, (4, 2, 2), groups=groups, transposed=transposed)},
        {"h.11.c_attn.weight": stored.T if transposed else stored, "h.11.c_attn.bias": bias},
    )
    for name, part, own_bias in zip(names, parts, biases, strict=True):
        check(source, f"{name.replace('*', '11')}.weight", part.flatten(0, 1))
        assert torch.equal(source.read(f"{name.replace('*', '11')}.bias"), own_bias.flatten())


def test_modules_are_renamed_and_others_keep_their_names(tmp_path: Path) -> None:
    wte, fc, other = torch.randn(5, 6), torch.randn(6, 7), torch.randn(5, 6)
    names: Names = {"wte": "model.embed_tokens", "h.*.fc": Piece("model.layers.*.mlp.up_proj", transposed=True)}
    source = named(tmp_path, names, {"wte.weight": wte, "h.0.fc.weight": fc, "other.weight": other})
    assert set(source.names()) == {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "other.weight"}
    check(source, "model.embed_tokens.weight", wte)
    check(source, "model.layers.0.mlp.up_proj.weight", fc.T)
    check(source, "other.weight", other)


def test_interleaved_heads_become_halves(tmp_path: Path) -> None:
    halves = torch.randn(2, 2, 3, 6)  # heads, halves, pairs
    stored = halves.transpose(1, 2).reshape(12, 6)
    source = named(tmp_path, {"q": interleaved("q_proj", 2, 6)}, {"q.weight": stored})
    check(source, "q_proj.weight", halves.reshape(12, 6))


@pytest.mark.parametrize("neighbours", [False, True])
def test_pairs_that_rotate_stand_half_a_head_apart(neighbours: bool) -> None:
    """Two query heads of 8 and one key head, of which the first 4 coordinates rotate, as rows of one matrix."""
    config = replace(CONFIG, num_heads=2, num_kv_heads=1, head_dim=8, rope=RopeConfig(1e4, partial_rotary_factor=0.5))
    query, key = fused(["q", "k"], (16, 8))
    pairs = (0, 2), (1, 3)
    if neighbours:
        pairs = (0, 1), (2, 3)
    head = [pairs[0][0], pairs[1][0], 4, 5, pairs[0][1], pairs[1][1], 6, 7]
    found = pairs_apart(query, key, config, neighbours=neighbours)
    assert [piece.module for piece in found] == ["q", "k"]
    assert [piece.rows for piece in found] == [(*head, *(8 + row for row in head)), tuple(16 + row for row in head)]


@pytest.mark.parametrize(
    ("name", "architecture", "expected"),
    [
        ("token_embd.weight", "LlamaForCausalLM", "model.embed_tokens.weight"),
        ("output.weight", "LlamaForCausalLM", "lm_head.weight"),
        ("blk.11.attn_q.bias", "Qwen2ForCausalLM", "model.layers.11.self_attn.q_proj.bias"),
        ("blk.0.ffn_norm.weight", "LlamaForCausalLM", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.0.ffn_norm.weight", "Gemma3ForCausalLM", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("blk.0.post_attention_norm.weight", "Gemma3ForCausalLM", "model.layers.0.post_attention_layernorm.weight"),
        ("rope_freqs.weight", "LlamaForCausalLM", None),
        ("blk.0.ffn_gate_exps.weight", "LlamaForCausalLM", None),
    ],
)
def test_gguf_names(name: str, architecture: str, expected: str | None) -> None:
    names = find_family(architecture).gguf_names(CONFIG)
    assert list(find_tensors(names, [name], keep_others=False)) == ([] if expected is None else [expected])


@pytest.mark.parametrize("transposed", [False, True])
def test_planes_are_the_matrices_of_experts(tmp_path: Path, transposed: bool) -> None:
    """Gates and ups that take turns in the matrix of an expert; tensors are named by their whole names."""
    stored, bias = torch.randn(3, 8, 6), torch.randn(3, 8)
    gate, up = tuple(range(0, 8, 2)), tuple(range(1, 8, 2))
    names: Names = {
        "model.layers.*.mlp.experts.gate_up": [
            *planes("gate_proj.weight", 3, gate, transposed=transposed),
            *planes("up_proj.weight", 3, up, transposed=transposed),
        ],
        "model.layers.*.mlp.experts.gate_up_bias": [
            *planes("gate_proj.bias", 3, gate),
            *planes("up_proj.bias", 3, up),
        ],
        "model.layers.*.mlp.down": planes("down_proj", 3),
    }
    given = {
        "model.layers.7.mlp.experts.gate_up": stored.transpose(1, 2) if transposed else stored,
        "model.layers.7.mlp.experts.gate_up_bias": bias,
        "model.layers.7.mlp.down.weight": stored.clone(),
    }
    source = named(tmp_path, names, given)
    for expert in range(3):
        module = f"model.layers.7.mlp.experts.{expert}"
        check(source, f"{module}.gate_proj.weight", stored[expert, ::2])
        check(source, f"{module}.up_proj.weight", stored[expert, 1::2])
        check(source, f"{module}.down_proj.weight", stored[expert])
        assert torch.equal(source.read(f"{module}.gate_proj.bias"), bias[expert, ::2])
    assert len(source.names()) == 5 * 3


def test_layers_of_nemotron_h_stand_in_a_backbone_or_in_a_model(tmp_path: Path) -> None:
    config = replace(CONFIG, recurrent=RecurrentConfig((True, True), heads=2, value_dim=3, conv_width=2, key_dim=2))
    stored, convolution = torch.randn(6 + 10 + 2, 8), torch.randn(10, 1, 2)
    for outer in ("backbone", "model"):
        tensors = {
            f"{outer}.layers.1.mixer.in_proj.weight": stored,
            f"{outer}.layers.1.mixer.conv1d.weight": convolution,
            f"{outer}.layers.1.mixer.A_log": torch.randn(2),
            f"{outer}.embeddings.weight": torch.randn(5, 8),
            f"{outer}.norm_f.weight": torch.randn(8),
        }
        source = named(tmp_path, find_family("NemotronHForCausalLM").names(config), tensors)
        for part, rows in zip("zxbc", stored[:16].split((6, 6, 2, 2)), strict=True):
            check(source, f"model.layers.1.mixer.{part}_proj.weight", rows)
        for part, rows in zip("xbc", convolution.split((6, 2, 2)), strict=True):
            assert torch.equal(source.read(f"model.layers.1.mixer.{part}_conv1d.weight"), rows)
        assert torch.equal(source.read("model.layers.1.mixer.dt_proj.weight"), stored[16:])
        assert {"model.layers.1.mixer.A_log", "model.embed_tokens.weight", "model.norm.weight"} < set(source.names())


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_a_nested_language_model_has_the_same_pieces(tmp_path: Path, prefix: str) -> None:
    stored = torch.randn(8, 6)
    parts = [f"model.layers.*.{part}" for part in ("a", "b")]
    names = nested({"model.layers.*.ab": fused(parts, (5, 3))})
    source = named(tmp_path, names, {f"{prefix}layers.3.ab.weight": stored, f"{prefix}norm.weight": stored[0].clone()})
    check(source, "model.layers.3.a.weight", stored[:5])
    assert torch.equal(source.read("model.norm.weight"), stored[0])


def test_of_names_that_begin_alike_the_longest_beginning_counts_and_numbers_are_kept() -> None:
    names = {
        "model.": "inner.",
        "model.layers.*.theirs.": "model.layers.*.ours.",
        "model.layers.*.theirs.shared.": "model.layers.*.shared.",
        "model.layers.*.theirs.gate": "model.layers.*.router",
    }
    expected = {
        "model.layers.3.theirs.experts.7.up.weight": "model.layers.3.ours.experts.7.up.weight",
        "model.layers.12.theirs.shared.up.weight": "model.layers.12.shared.up.weight",
        "model.layers.0.theirs.gate.weight": "model.layers.0.router.weight",
        "model.layers.1.other.weight": "inner.layers.1.other.weight",
        "lm_head.weight": "lm_head.weight",
    }
    found = find_tensors(names, expected, keep_others=True)
    assert {at.name: name for name, at in found.items()} == expected

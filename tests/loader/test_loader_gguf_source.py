from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from bough.core.model_config import LatentConfig, ModelConfig, MoEConfig
from bough.loader.load import open_source
from bough.loader.locate import ModelFiles
from bough.loader.source import WeightSource

MakeGguf = Callable[..., Path]
QUERY, KEY, VALUE = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


def interleaved(checkpoint: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows: coordinates i and i + half become neighbours."""
    half = len(checkpoint) // heads // 2
    halves = checkpoint.reshape(heads, 2, half, *checkpoint.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(checkpoint.shape))


@pytest.fixture
def checkpoint() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"attn_q.weight": (64, 64), "attn_k.weight": (32, 64), "attn_v.weight": (32, 64), "attn_q.bias": (64,)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def open_file(path: Path, config: ModelConfig) -> WeightSource:
    return open_source(ModelFiles("tiny", path.parent, gguf=path), config)


def open_gguf(make: MakeGguf, tensors: dict[str, np.ndarray], config: ModelConfig, **options: object) -> WeightSource:
    named = {f"blk.0.{name}": values for name, values in tensors.items()}
    return open_file(make(tensors=named, **options), config)


def test_llama_heads_get_their_order_back(
    make_gguf: MakeGguf, checkpoint: dict[str, np.ndarray], tiny_config: ModelConfig
) -> None:
    stored = dict(checkpoint)
    for name, heads in {"attn_q.weight": 4, "attn_k.weight": 2, "attn_q.bias": 4}.items():
        stored[name] = interleaved(checkpoint[name], heads)
    source = open_gguf(make_gguf, stored, tiny_config)
    expected = torch.from_numpy(checkpoint["attn_q.weight"])
    assert torch.equal(source.read(QUERY), expected)
    assert torch.equal(source.read(QUERY, (slice(16, 48),)), expected[16:48])
    assert torch.equal(source.read(QUERY, (slice(3, 9), slice(5, 60))), expected[3:9, 5:60])
    assert torch.equal(source.read(KEY), torch.from_numpy(checkpoint["attn_k.weight"]))
    assert torch.equal(source.read(VALUE), torch.from_numpy(checkpoint["attn_v.weight"]))
    bias = torch.from_numpy(checkpoint["attn_q.bias"])
    assert torch.equal(source.read(QUERY.replace("weight", "bias")), bias)
    assert torch.equal(source.read(QUERY.replace("weight", "bias"), (slice(8, 24),)), bias[8:24])


def test_other_architectures_are_stored_in_order(
    make_gguf: MakeGguf, checkpoint: dict[str, np.ndarray], tiny_config: ModelConfig
) -> None:
    source = open_gguf(make_gguf, checkpoint, tiny_config, architecture="qwen2")
    assert torch.equal(source.read(QUERY), torch.from_numpy(checkpoint["attn_q.weight"]))


def test_parts_of_quantised_tensors(
    make_gguf: MakeGguf, checkpoint: dict[str, np.ndarray], tiny_config: ModelConfig
) -> None:
    kinds = {"blk.0.attn_v.weight": gguf.GGMLQuantizationType.Q8_0}
    source = open_gguf(make_gguf, checkpoint, tiny_config, kinds=kinds)
    whole = source.read(VALUE)
    assert torch.allclose(whole, torch.from_numpy(checkpoint["attn_v.weight"]), atol=0.02)
    for columns in (slice(10, 50), slice(32, 64), slice(40, 60)):  # a part may begin inside a block
        assert torch.equal(source.read(VALUE, (slice(7, 20), columns)), whole[7:20, columns])
    assert source.shape(VALUE) == (32, 64)


def test_only_weights_are_listed(make_gguf: MakeGguf, tiny_config: ModelConfig) -> None:
    tensors = {"token_embd.weight": np.ones((10, 64), np.float32), "rope_freqs.weight": np.ones(8, np.float32)}
    assert open_file(make_gguf(tensors=tensors), tiny_config).names() == ["model.embed_tokens.weight"]


def test_a_type_without_kernels_is_dequantised_and_told_once(
    make_gguf: MakeGguf, tiny_config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    kind = gguf.GGMLQuantizationType.TQ2_0
    values = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    names = ["blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"]
    path = make_gguf(tensors=dict.fromkeys(names, values), kinds=dict.fromkeys(names, kind))
    source = open_file(path, tiny_config)
    with caplog.at_level("INFO"):
        for name in source.names():
            rows, stored = source.read_stored(name)
            assert stored == source.stored_type(name) == gguf.GGMLQuantizationType.F32
            np.testing.assert_array_equal(rows.view(np.float32), source.read(name).numpy())
    assert [record.getMessage() for record in caplog.records] == [
        "weights of GGUF type TQ2_0 have no native kernel; they are dequantised to float32"
    ]


def test_experts_whose_gates_and_ups_are_fused(make_gguf: MakeGguf, tiny_config: ModelConfig) -> None:
    values = np.random.default_rng(0).normal(size=(3, 16, 64)).astype(np.float32)
    path = make_gguf(tensors={"blk.0.ffn_gate_up_exps.weight": values})
    source = open_file(path, replace(tiny_config, moe=MoEConfig(experts=3, per_token=2, intermediate_size=8)))
    for expert in range(3):
        for part, rows in {"gate": slice(0, 8), "up": slice(8, 16)}.items():
            found = source.read(f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight", (slice(1, 5),))
            np.testing.assert_array_equal(found.numpy(), values[expert, rows][1:5])


def test_halves_of_keys_and_values_are_joined(make_gguf: MakeGguf, tiny_config: ModelConfig) -> None:
    """DeepSeek's, of 2 heads: keys [rank, nope] and values [value, rank] of each."""
    random, name = np.random.default_rng(0), "model.layers.0.self_attn.kv_b_proj.weight"
    keys, values = random.normal(size=(2, 20, 12)), random.normal(size=(2, 10, 20))
    tensors = {"blk.0.attn_k_b.weight": keys.astype(np.float32), "blk.0.attn_v_b.weight": values.astype(np.float32)}
    latent = LatentConfig(rank=20, rope_dim=4, nope_dim=12, value_dim=10)
    config = replace(tiny_config, num_heads=2, latent=latent)
    source = open_file(make_gguf(tensors=tensors, architecture="deepseek2"), config)
    expected = np.concatenate([each for head in range(2) for each in (keys[head].T, values[head])]).astype(np.float32)
    assert source.names() == [name] and source.shape(name) == (44, 20)
    np.testing.assert_array_equal(source.read(name, (slice(5, 30), slice(3, 9))).numpy(), expected[5:30, 3:9])
    rows, kind = source.read_stored(name)
    assert kind == source.stored_type(name)
    np.testing.assert_array_equal(rows.view(np.float32), expected)


def test_quantised_experts_are_read_one_by_one(make_gguf: MakeGguf, tiny_config: ModelConfig) -> None:
    values = np.random.default_rng(0).normal(size=(3, 8, 64)).astype(np.float32)
    name, kind = "blk.0.ffn_up_exps.weight", gguf.GGMLQuantizationType.Q8_0
    path = make_gguf(tensors={name: values}, kinds={name: kind})
    source = open_file(path, replace(tiny_config, moe=MoEConfig(experts=3, per_token=2, intermediate_size=8)))
    assert len(source.names()) == 3
    for expert in range(3):
        up = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        assert source.shape(up) == (8, 64) and source.stored_type(up) == kind
        rows, stored = source.read_stored(up, (slice(2, 7),))
        assert stored == kind
        np.testing.assert_array_equal(rows, gguf.quants.quantize(values[expert, 2:7], kind))
        np.testing.assert_array_equal(source.read(up, (slice(2, 7),)).numpy(), gguf.quants.dequantize(rows, kind))
        assert torch.equal(source.read(up, (slice(2, 7), slice(5, 50))), source.read(up)[2:7, 5:50])

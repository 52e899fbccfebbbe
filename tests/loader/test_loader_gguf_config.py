from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.core.errors import ModelError
from bough.core.model_config import LatentConfig, ModelConfig, RopeConfig
from bough.loader.config import read_config
from bough.loader.locate import ModelFiles

MakeGguf = Callable[..., Path]
EMBEDDING = {"token_embd.weight": np.zeros((10, 64), np.float32)}
SHAPE = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 0.25,
    "rope.freq_base": 5000.0,
}


def read(path: Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    return read_config(ModelFiles("tiny", path.parent, gguf=path), overrides)


def test_smollm2(smollm2: Path) -> None:
    config = read(smollm2)
    assert (config.architecture, config.num_layers, config.hidden_size) == ("LlamaForCausalLM", 30, 576)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.context_length, config.intermediate_size) == (49152, 8192, 1536)
    assert (config.rope, config.tied_embeddings) == (RopeConfig(theta=100_000.0), True)
    assert config.eos_token_ids == (2,)
    assert config.norm_eps == pytest.approx(1e-5)


def test_llama(make_gguf: MakeGguf) -> None:
    config = read(make_gguf(shape=SHAPE, extra={"general.file_type": 1, "tokenizer.ggml.eos_token_id": 3}))
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=10,
        context_length=128,
        norm_eps=0.25,
        rope=RopeConfig(theta=5000.0),
        tied_embeddings=True,
        eos_token_ids=(3,),
        dtype="float16",
    )


def test_output_tensor_means_untied_and_bias_tensors_mean_biases(make_gguf: MakeGguf) -> None:
    more = {"output.weight": EMBEDDING["token_embd.weight"], "blk.0.attn_q.bias": np.zeros(64, np.float32)}
    config = read(make_gguf(tensors=EMBEDDING | more))
    assert not config.tied_embeddings
    assert config.qkv_bias and config.output_bias


def test_stored_rope_factors(make_gguf: MakeGguf) -> None:
    factors = np.array([1, 1, 2, 4, 8, 8, 8, 8], np.float32)
    path = make_gguf(tensors=EMBEDDING | {"rope_freqs.weight": factors})
    config = read(path)
    assert config.rope == RopeConfig(theta=5000.0, factors=tuple(factors.tolist()))
    scaled = read(path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert scaled.rope == RopeConfig(theta=5000.0, kind="linear", factor=2.0)


def test_rope_scaling(make_gguf: MakeGguf) -> None:
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    config = read(make_gguf("qwen2", shape=SHAPE | scaling))
    assert (config.rope.kind, config.rope.factor, config.rope.original_context) == ("yarn", 4.0, 32)
    with pytest.raises(ModelError, match="rope_scaling: long_factor is missing"):
        read(make_gguf(shape=SHAPE | {"rope.scaling.type": "longrope"}))


def test_qwen(make_gguf: MakeGguf) -> None:
    two = read(make_gguf("qwen2", shape=SHAPE))
    assert (two.architecture, two.qkv_bias, two.output_bias) == ("Qwen2ForCausalLM", True, False)
    three = read(make_gguf("qwen3", shape=SHAPE | {"attention.key_length": 32}))
    assert (three.architecture, three.qk_norm, three.head_dim) == ("Qwen3ForCausalLM", True, 32)


def test_gemma3(make_gguf: MakeGguf) -> None:
    shape = SHAPE | {"block_count": 7, "attention.key_length": 64, "attention.sliding_window": 16}
    config = read(make_gguf("gemma3", shape=shape))
    assert config.sliding_layers == (True,) * 5 + (False, True)
    assert (config.sliding_window, config.query_scale, config.embedding_scale) == (16, 0.125, 8.0)
    assert config.norm_plus_one is False  # llama.cpp has added the one
    assert (config.rope.theta, config.local_rope) == (5000.0, RopeConfig(10_000.0))
    assert config.activation == "gelu_tanh"
    largest = read(make_gguf("gemma3", shape=shape | {"block_count": 62}))
    assert largest.query_scale == (64 / 4) ** -0.5


def test_deepseek(make_gguf: MakeGguf) -> None:
    """Files from before latent attention was computed there, which say nothing of groups."""
    more = {"attention.key_length": 24, "attention.value_length": 16, "attention.kv_lora_rank": 32}
    more |= {"rope.dimension_count": 8, "expert_feed_forward_length": 32, "expert_used_count": 2}
    shape = SHAPE | more | {"expert_shared_count": 1, "expert_count": 256}
    two = read(make_gguf("deepseek2", shape=shape))
    assert two.latent == LatentConfig(rank=32, rope_dim=8, nope_dim=16, value_dim=16)
    assert two.moe is not None and (two.architecture, two.moe.groups) == ("DeepseekV2ForCausalLM", 1)
    three = read(make_gguf("deepseek2", shape=shape | {"expert_gating_func": 2})).moe
    assert three is not None and (three.scores, three.groups, three.top_groups) == ("sigmoid", 8, 4)
    kimi = read(make_gguf("deepseek2", shape=shape | {"expert_gating_func": 2, "expert_count": 384})).moe
    assert kimi is not None and (kimi.scores, kimi.groups, kimi.top_groups) == ("sigmoid", 1, 1)


def test_gemma2(make_gguf: MakeGguf) -> None:
    shape = SHAPE | {"attention.key_length": 64, "attention.sliding_window": 16}
    config = read(make_gguf("gemma2", shape=shape))
    assert (config.sliding_layers, config.query_scale) == ((True, False), 0.125)
    assert read(make_gguf("gemma2", shape=shape | {"block_count": 46})).query_scale == (64 / 4) ** -0.5


def test_ends_from_metadata_and_from_the_chat_template(make_gguf: MakeGguf) -> None:
    extra = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<|im_end|>", "<|eot_id|>"],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ message }}<|im_end|>",
    }
    assert read(make_gguf(extra=extra)).eos_token_ids == (1, 2)
    assert read(make_gguf(extra=extra | {"tokenizer.ggml.eot_token_id": 3})).eos_token_ids == (1, 3, 2)
    phi = {"tokenizer.ggml.tokens": ["a", "b", "<|end|>"], "tokenizer.chat_template": "{{ message }}<|end|>"}
    assert read(make_gguf("phi3", extra=extra | phi)).eos_token_ids == (1, 2)
    harmony = phi | {"tokenizer.chat_template": "{{ thinking }}<|end|>{{ answer }}<|return|>"}
    assert read(make_gguf(extra=extra | harmony)).eos_token_ids == (1,)
    del extra["tokenizer.chat_template"]
    assert read(make_gguf(extra=extra)).eos_token_ids == (1,)


def test_overrides_hold_for_gguf_too(make_gguf: MakeGguf) -> None:
    config = read(make_gguf(), {"num_hidden_layers": 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert (config.num_layers, config.rope.kind) == (1, "linear")


def test_per_layer_numbers_must_agree(make_gguf: MakeGguf) -> None:
    assert read(make_gguf(shape=SHAPE | {"attention.head_count_kv": [2, 2]})).num_kv_heads == 2
    with pytest.raises(ModelError, match="head_count_kv differs between layers"):
        read(make_gguf(shape=SHAPE | {"attention.head_count_kv": [2, 4]}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architecture": "mamba"}, "'mamba' is not supported; supported are llama, "),
        ({"shape": {}}, r"lack llama\.attention\.head_count"),
        ({"tensors": {"other": np.zeros(4, np.float32)}}, r"no token_embd\.weight"),
        ({"extra": {"split.count": 3}}, r"one of 3 files .* -00001-of-00003\.gguf"),
        ({"shape": SHAPE | {"block_count": 2.5}}, r"block_count is 2\.5, which is no number of layers"),
        ({"shape": SHAPE | {"block_count": 4_000_000_000}}, r"block_count is 4000000000, which is no number"),
        (
            {"shape": SHAPE | {"block_count": 0}, "tensors": EMBEDDING | {"blk.0": np.zeros(4, np.float32)}},
            "is 0, which",
        ),
        ({"shape": SHAPE | {"rope.dimension_count": 8}}, r"partial_rotary_factor = 0\.5"),
    ],
)
def test_what_cannot_be_run_is_refused(make_gguf: MakeGguf, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=rf"tiny\.gguf.*{text}"):
        read(make_gguf(**changes))

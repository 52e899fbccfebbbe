"""What families refuse, in a sentence, and how they read fields that no other has."""

from __future__ import annotations

from typing import Any

import pytest

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.fields import Fields
from bough.models.registry import find_family

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 512,
}


INSTEAD = r"--model-impl transformers may run it, more slowly\."


def read(model_type: str, **fields: Any) -> ModelConfig:
    family = find_family(model_type)
    return family.read_config(Fields("config.json", {**family.defaults, **SIZES, **fields}))


@pytest.mark.parametrize(
    ("model_type", "fields", "text"),
    [
        ("cohere", {"use_qk_norm": True}, f"use_qk_norm = True is not supported; {INSTEAD}"),
        ("cohere2", {"use_qk_norm": True}, r"use_qk_norm = True is not supported\."),  # nor has transformers
        ("phi", {"qk_layernorm": True}, f"qk_layernorm = True is not supported; {INSTEAD}"),
        ("stablelm", {"qk_layernorm": True}, f"qk_layernorm = True is not supported; {INSTEAD}"),
        ("olmo", {"clip_qkv": 8.0}, f"clip_qkv = 8.0 is not supported; {INSTEAD}"),
        ("olmoe", {"clip_qkv": 8.0}, f"clip_qkv = 8.0 is not supported; {INSTEAD}"),
        (
            "gpt2",
            {"n_embd": 64, "scale_attn_by_inverse_layer_idx": True},
            f"layer_idx = True is not supported; {INSTEAD}",
        ),
        ("llama", {"hidden_act": "gelu"}, f"hidden_act = 'gelu' is not supported; supported are silu, .*; {INSTEAD}"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "attention_bias": True},
            r"attention_bias = True is not supported\.",  # nor has --model-impl transformers latent attention
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "scoring_func": "softmax"},
            r"scoring_func = 'softmax' is not supported\.",
        ),
        ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, r"hidden_act = 'gelu_pytorch_tanh' is not supported\."),
        ("bert", {"position_embedding_type": "relative_key"}, r"'relative_key' is not supported\."),
        ("roberta", {"pad_token_id": 0}, "pad_token_id is 0; positions are read for 1 alone"),
        ("opt", {"ffn_dim": 80, "do_layer_norm_before": False}, r"\(opt-350m\) are not supported"),
        ("opt", {"ffn_dim": 80, "word_embed_proj_dim": 32}, r"\(opt-350m\) are not supported"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must list 0 or 1 for each of 4 layers"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be a whole number"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "long_factor is missing"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M-E*", "mamba_hidden_act": "gelu"},
            r"mamba_hidden_act = 'gelu' is not supported\.",
        ),
        ("nemotron_h", {}, "layers_block_type is missing"),
        ("nemotron_h", {"hybrid_override_pattern": "M?"}, "layer_types may hold linear_attention and"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "32 value heads cannot share 3 key heads evenly"),
        ("granitemoehybrid", {"mamba_n_heads": 3}, "3 Mamba heads fit neither 128 columns nor their groups"),
        ("granitemoehybrid", {"time_step_limit": ["soon", 1.0]}, "time_step_limit must be two numbers"),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type = 'alibi' is not supported",
        ),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [1, 5]}}, "kda_layers names layers that are not there"),
    ],
)
def test_what_is_refused(model_type: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{text}"):
        read(model_type, **fields)


def test_layers_that_slide_or_do_not_rotate_where_the_checkpoint_lists_none() -> None:
    assert read("gemma2").sliding_layers == (True, False, True, False)
    assert read("olmo3").sliding_layers == (True, True, True, False)
    assert read("cwm").sliding_layers == (False, True, True, True)
    for name in ("cohere2", "exaone4"):
        config = read(name)
        assert (config.sliding_layers, config.unrotated_layers) == ((True,) * 3 + (False,), (False,) * 3 + (True,))
    assert read("exaone4", sliding_window=None).unrotated_layers == ()
    assert read("smollm3").unrotated_layers == (False, False, False, True)
    windows = read("smollm3", use_sliding_window=True, sliding_window=16, no_rope_layers=[1, 0, 1, 1])
    assert (windows.sliding_layers, windows.unrotated_layers) == ((False, True, False, False),) * 2


def test_scaling_for_long_contexts_spares_the_windows_of_olmo3() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    config = read("olmo3", rope_theta=7e5, rope_scaling=yarn)
    assert (config.rope_of(3).kind, config.rope_of(3).theta) == ("yarn", 7e5)
    assert (config.rope_of(0).kind, config.rope_of(0).theta) == ("default", 7e5)


def test_queries_grow_where_the_rotation_says_so() -> None:
    assert read("ministral3").query_growth == (0.1, 16_384, 0)
    assert read("mistral3", rope_parameters={"rope_theta": 1e6}).query_growth is None
    assert read("llama4_text", attn_temperature_tuning=4).query_growth == (0.1, 8192, 1)
    assert read("llama4_text", attn_temperature_tuning=False).query_growth is None


def test_gemma4_reads_wide_heads_from_either_form_of_its_configuration() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    shapes = [read("gemma4_text", layer_types=types, head_dim=8).kv_shape(layer) for layer in range(4)]
    assert shapes == [(2, 8), (2, 512), (2, 8), (2, 512)], "the last layer sees everything"
    fewer = {"num_global_key_value_heads": 1, "global_head_dim": 16}
    assert read("gemma4_text", layer_types=types, head_dim=8, **fewer).kv_shapes == ((2, 8), (2, 16))
    assert read("gemma4_text", layer_types=types, attention_k_eq_v=True, **fewer).kv_shape(1) == (1, 16)
    written = {"1": {"head_dim": 16, "num_key_value_heads": 1}}
    assert read("gemma4_text", layer_types=types, per_layer_config=written).kv_shape(1) == (1, 16)


def test_llama4_has_one_expert_for_a_token() -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok must be 1"):
        read("llama4_text", num_experts_per_tok=2)
    config = read("llama4_text", moe_layers=[1])
    assert config.moe is not None and config.moe.dense_layers == (True, False, True, True)
    assert config.sliding_layers == (True, True, True, False) and config.unrotated_layers == (False,) * 3 + (True,)


def test_layers_with_states_as_published_checkpoints_list_them() -> None:
    def states(name: str, **fields: Any) -> tuple[bool, ...]:
        recurrent = read(name, **fields).recurrent
        assert recurrent is not None
        return recurrent.layers

    assert states("qwen3_next") == (True, True, True, False)
    assert states("qwen3_5", full_attention_interval=2) == (True, False, True, False)
    assert states("granitemoehybrid", layer_types=["mamba", "attention"] * 2) == (True, False) * 2
    assert states("granitemoehybrid") == (True,) * 4
    assert states("lfm2", full_attn_idxs=[2]) == (True, True, False, True)
    alone = read("lfm2")
    assert alone.recurrent is not None and not any(alone.recurrent.layers)
    assert alone.states is None and len(alone.kv_groups) == 1, "attention in all layers"
    nested = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 8}
    kimi = read("kimi_linear", linear_attn_config=nested)
    assert kimi.recurrent is not None and kimi.latent is not None
    assert (kimi.recurrent.layers, kimi.recurrent.heads, kimi.recurrent.key_dim) == ((True, True, False, True), 2, 8)
    assert states("kimi_linear", num_hidden_layers=6) == (True, True, True, True, False, True)
    hybrid = read("nemotron_h", hybrid_override_pattern="M-*ME", num_hidden_layers=5)
    assert hybrid.recurrent is not None and hybrid.moe is not None
    assert hybrid.moe.dense_layers == (True, True, True, True, False) and not hybrid.moe.gated
    assert hybrid.recurrent.layers == (True, False, False, True, False)
    assert [hybrid.attends(layer) for layer in range(5)] == [False, False, True, False, False]


def test_time_steps_without_a_bound_are_read_as_transformers_writes_them() -> None:
    recurrent = read("granitemoehybrid", time_step_limit=[0.001, {"__float__": "Infinity"}]).recurrent
    assert recurrent is not None and recurrent.step_limits == (0.001, float("inf"))


def test_kimi_k25_reads_images_by_the_name_that_moonshot_gives_their_token() -> None:
    family = find_family("KimiK25ForConditionalGeneration")
    for name in ("image_token_id", "media_placeholder_token_id"):
        media = family.read_media(Fields("config.json", {"vision_config": {"patch_size": 14}, name: 163605}))
        assert media is not None and media.placeholder == 163605
        assert media.architecture == "Kimi_K25ForConditionalGeneration"

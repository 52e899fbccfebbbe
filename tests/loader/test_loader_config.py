from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, RopeConfig
from bough.loader.config import read_config, read_sampling_defaults
from bough.loader.locate import ModelFiles

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads TINY with changes, as if it stood in a config.json."""

    def read_with(
        architecture: str = "LlamaForCausalLM",
        overrides: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        base: Mapping[str, Any] = TINY,
        **changes: Any,
    ) -> ModelConfig:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"architectures": [architecture], **base, **changes}))
        files = ModelFiles("tiny", tmp_path, config=path)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
            files = replace(files, generation_config=tmp_path / "generation_config.json")
        return read_config(files, overrides)

    return read_with


def test_llama(read: Read) -> None:
    config = read(rms_norm_eps=1e-5, rope_theta=5e5, attention_bias=True, mlp_bias=True, torch_dtype="float16")
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        context_length=512,
        norm_eps=1e-5,
        rope=RopeConfig(theta=5e5),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        eos_token_ids=(2,),
        dtype="float16",
    )


def test_mistral_slides_everywhere_or_nowhere(read: Read) -> None:
    sliding = read("MistralForCausalLM", sliding_window=32, head_dim=32)
    assert (sliding.sliding_window, sliding.sliding_layers, sliding.head_dim) == (32, (True,) * 4, 32)
    full = read("MistralForCausalLM", sliding_window=None)
    assert (full.sliding_window, full.sliding_layers) == (None, ())


def test_qwen2_has_biases_and_slides_only_when_told(read: Read) -> None:
    config = read("Qwen2ForCausalLM", sliding_window=32, use_sliding_window=False)
    assert (config.qkv_bias, config.output_bias, config.sliding_window, config.qk_norm) == (True, False, None, False)
    config = read("Qwen2ForCausalLM", sliding_window=32, use_sliding_window=True, max_window_layers=3)
    assert (config.sliding_window, config.sliding_layers) == (32, (False, False, False, True))
    types = ["sliding_attention", "full_attention"] * 2
    config = read("Qwen2ForCausalLM", sliding_window=32, use_sliding_window=True, layer_types=types)
    assert config.sliding_layers == (True, False, True, False)
    config = read("Qwen2ForCausalLM", sliding_window=32, use_sliding_window=True, max_window_layers=4)
    assert (config.sliding_window, config.sliding_layers) == (None, ())


def test_qwen3_normalises_heads(read: Read) -> None:
    config = read("Qwen3ForCausalLM")
    assert (config.qk_norm, config.qkv_bias, config.head_dim) == (True, False, 128)


def test_gemma3(read: Read) -> None:
    config = read("Gemma3ForCausalLM", sliding_window=16, sliding_window_pattern=2, query_pre_attn_scalar=64)
    assert (config.sliding_window, config.sliding_layers) == (16, (True, False, True, False))
    assert (config.query_scale, config.embedding_scale, config.head_dim) == (0.125, 8.0, 256)
    assert (config.norm_plus_one, config.qk_norm, config.tied_embeddings, config.activation) == (
        True,
        True,
        True,
        "gelu_tanh",
    )
    assert (config.rope, config.local_rope) == (RopeConfig(1e6), RopeConfig(1e4))
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    config = read("Gemma3ForCausalLM", attn_logit_softcapping=50, final_logit_softcapping=30.0)
    assert (config.attention_softcap, config.logit_softcap) == (None, 30.0)  # as transformers has it


def test_gemma3_inside_a_multimodal_checkpoint(read: Read) -> None:
    config = read(
        "Gemma3ForConditionalGeneration",
        base={
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "dtype": "bfloat16",
            "vision_config": {"hidden_size": 7},
        },
        text_config={
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    )
    assert (config.architecture, config.hidden_size, config.num_heads, config.num_kv_heads) == (
        "Gemma3ForCausalLM",
        2560,
        8,
        4,
    )
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert config.local_rope == RopeConfig(1e4)
    assert (config.context_length, config.eos_token_ids, config.vocab_size) == (131_072, (1, 106), 262_208)
    assert sum(config.sliding_layers) == 29


def test_model_type_serves_where_architectures_are_missing(read: Read) -> None:
    assert read(architectures=None, model_type="qwen3").architecture == "Qwen3ForCausalLM"


def test_ends_are_gathered_from_both_files(read: Read) -> None:
    config = read(eos_token_id=7, generation={"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (7, 9)


def test_overrides_replace_fields(read: Read) -> None:
    config = read(overrides={"num_hidden_layers": 1, "eos_token_id": 5}, eos_token_id=7)
    assert (config.num_layers, config.eos_token_ids) == (1, (5,))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"architecture": "NobodysLMHeadModel"},
            r"'NobodysLMHeadModel' is not supported; supported are LlamaForCausalLM, .*",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number from 1 to 1,048,576, got '64'"),
        ({"hidden_size": 10**12}, "hidden_size must be a whole number from 1 to 1,048,576, got 1000000000000"),
        ({"intermediate_size": 10**9}, "intermediate_size must be a whole number from 1 to 4,194,304, got 1000000000"),
        ({"vocab_size": 10**12}, "vocab_size must be a whole number from 1 to 2,147,483,647, got 1000000000000"),
        ({"num_attention_heads": 10**9}, "num_attention_heads must be a whole number from 1 to 65,536, got 1000000000"),
        ({"head_dim": 10**9}, "head_dim must be a whole number from 1 to 65,536, got 1000000000"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}},
            r"rope_scaling: factor must be a number above 0 and below 1,000,000, got 1e\+300",
        ),
        (
            {"architecture": "Gemma3ForCausalLM", "layer_types": ["a lot of it"] * 10**5},
            r"layer_types may hold .* only, got (.){200}\.$",
        ),
        (
            {"architecture": "MixtralForCausalLM", "num_local_experts": 10**9, "num_experts_per_tok": 2},
            "num_local_experts must be a whole number from 1 to 65,536, got 1000000000",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 4,096, got 1000000000"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised with 'aqlm' are not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
        ({"eos_token_id": 10**30}, "eos_token_id must be a token id"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0"),
        ({"architecture": "Gemma3ForCausalLM", "layer_types": ["chunked"] * 4}, "layer_types may hold"),
        ({"architecture": "Gemma3ForCausalLM", "layer_types": ["full_attention"]}, "names 1 of 4 layers"),
        ({"architecture": "Gemma3ForCausalLM", "use_bidirectional_attention": True}, "both directions"),
        ({"architecture": "Gemma4ForCausalLM", "use_bidirectional_attention": "all"}, "both directions"),
    ],
)
def test_what_cannot_be_run_is_refused(read: Read, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{text}"):
        read(**changes)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe"])
def test_damaged_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json .*fetch it again"):
        read_config(ModelFiles("tiny", tmp_path, config=path))


def test_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(ModelFiles("tiny", tmp_path))


def test_sampling_defaults_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    files = ModelFiles("tiny", tmp_path, generation_config=path)
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": None, "max_length": 9}))
    assert read_sampling_defaults(files) == {"temperature": 0.6, "top_k": -1}
    path.write_text(json.dumps({"min_p": "low"}))
    with pytest.raises(ModelError, match="min_p must be a number, got 'low'"):
        read_sampling_defaults(files)
    assert read_sampling_defaults(ModelFiles("tiny", tmp_path)) == {}


def transformers_configs() -> dict[str, Any]:
    import transformers

    shape = {**TINY, "head_dim": 32}
    return {
        "LlamaForCausalLM": transformers.LlamaConfig(**TINY, rope_theta=3e4),
        "MistralForCausalLM": transformers.MistralConfig(**shape),
        "Qwen2ForCausalLM": transformers.Qwen2Config(**TINY, use_sliding_window=True, max_window_layers=2),
        "Qwen3ForCausalLM": transformers.Qwen3Config(**shape, attention_bias=True),
        "Gemma3ForCausalLM": transformers.Gemma3TextConfig(
            **shape, rope_scaling={"rope_type": "linear", "factor": 8.0}
        ),
    }


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"],
)
def test_what_transformers_writes_is_read_as_transformers_means_it(tmp_path: Path, architecture: str) -> None:
    reference = transformers_configs()[architecture]
    reference.architectures = [architecture]
    reference.save_pretrained(tmp_path)
    config = read_config(ModelFiles("tiny", tmp_path, config=tmp_path / "config.json"))
    assert config.architecture == architecture
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert config.head_dim == (getattr(reference, "head_dim", None) or 16)
    assert (config.norm_eps, config.context_length) == (reference.rms_norm_eps, 512)
    assert config.tied_embeddings == reference.tie_word_embeddings
    rope = reference.rope_parameters.get("full_attention", reference.rope_parameters)
    assert (config.rope.theta, config.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    layer_types = getattr(reference, "layer_types", None)
    if architecture == "MistralForCausalLM":
        layer_types = ["sliding_attention"] * 4
    slides = [kind == "sliding_attention" for kind in layer_types or ["full_attention"] * 4]
    assert [config.slides(layer) for layer in range(4)] == slides
    if any(slides):
        assert config.sliding_window == reference.sliding_window
    if architecture == "Gemma3ForCausalLM":
        assert config.local_rope == RopeConfig(reference.rope_parameters["sliding_attention"]["rope_theta"])
        assert math.isclose(config.query_scale or 0.0, reference.query_pre_attn_scalar**-0.5)


@pytest.mark.parametrize("field", ["moe", "quantization", "yarn"])
def test_params_that_change_the_model_are_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "params.json"
    shape = {"dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2}
    path.write_text(json.dumps({**shape, "vocab_size": 100, field: {"some": 1}}))
    with pytest.raises(ModelError, match=rf"params\.json(: {field}|, moe: some) is not supported"):
        read_config(ModelFiles("tiny", tmp_path, config=path))

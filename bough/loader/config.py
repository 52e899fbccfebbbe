"""Turns a checkpoint's own configuration into a `ModelConfig`, and its generation settings into sampling defaults.

There is one reader: `gguf_config` first puts GGUF metadata into the form of a Hugging Face config.json, so overrides
and checks hold for both. Fields that a config.json leaves out have the defaults of the Transformers class behind it.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import Activation, ModelConfig
from bough.loader.fields import Fields, read_json
from bough.loader.locate import ModelFiles
from bough.loader.rope_config import read_local_rope, read_rope, trained_context

COMMON_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
QWEN_DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
# What the Transformers class of each architecture assumes; its names are the keys of the model registry.
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "MistralForCausalLM": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": QWEN_DEFAULTS,
    "Qwen3ForCausalLM": QWEN_DEFAULTS | {"head_dim": 128},
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}
# Spellings under which the same text model appears.
ALIASES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = ("float32", "float16", "bfloat16")
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_config(files: ModelFiles, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model's shape. `overrides` are fields of config.json (`--json-model-override-args`) that replace its own."""
    if files.gguf is not None:
        from bough.loader.gguf_config import read_gguf_config  # the gguf package takes a moment to load

        given, freq_factors = read_gguf_config(files.gguf)
        config = _build(str(files.gguf), given, overrides or {}, _generation_eos(files))
        # llama.cpp stores Gemma's norms with the one already added, and the result of Llama 3's rope scaling. Another
        # scaling can only come from the overrides, and takes that one's place.
        rope = replace(config.rope, factors=freq_factors) if config.rope.kind == "default" else config.rope
        return replace(config, norm_plus_one=False, rope=rope)
    if files.config is None:
        raise ModelError(f"{files.folder} has no config.json, so the model's shape is unknown.")
    return _build(str(files.config), read_json(files.config), overrides or {}, _generation_eos(files))


def read_sampling_defaults(files: ModelFiles) -> dict[str, float | int]:
    """The sampling parameters that the model's makers recommend, by SGLang's names; empty when they name none."""
    if files.generation_config is None:
        return {}
    given = read_json(files.generation_config)
    defaults: dict[str, float | int] = {}
    for name in SAMPLING_FIELDS:
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{files.generation_config}: {name} must be a number, got {value!r}.")
        defaults[name] = value
    if defaults.get("top_k") == 0:  # Transformers' way to say "off"
        defaults["top_k"] = -1
    return defaults


def _generation_eos(files: ModelFiles) -> tuple[int, ...]:
    path = files.generation_config
    return () if path is None else Fields(str(path), read_json(path)).token_ids("eos_token_id")


def _build(
    where: str, given: Mapping[str, Any], overrides: Mapping[str, Any], more_eos: tuple[int, ...]
) -> ModelConfig:
    architecture = _architecture(where, {**given, **overrides})
    text = Fields(where, given).section("text_config")  # a multimodal checkpoint keeps its language model there
    layers: list[Mapping[str, Any]] = [overrides, text.values if text else {}, given]
    config = Fields(where, ChainMap(*map(dict, [*layers, DEFAULTS[architecture], COMMON_DEFAULTS])))
    _refuse_unsupported(config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = config.optional_integer("head_dim") or hidden // heads
    if heads % kv_heads:
        raise ModelError(f"{where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly.")
    num_layers = config.integer("num_hidden_layers")
    window, sliding = _sliding(architecture, config, num_layers)
    gemma = architecture == "Gemma3ForCausalLM"
    biased = config.boolean("attention_bias") and architecture != "MistralForCausalLM"
    rope = read_rope(config)
    outer_eos = Fields(where, given).token_ids("eos_token_id") if "eos_token_id" not in overrides else ()
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        context_length=trained_context(config, rope),
        norm_eps=config.number("rms_norm_eps"),
        rope=rope,
        local_rope=read_local_rope(config) if gemma else None,
        activation=_activation(config, "hidden_activation" if gemma else "hidden_act"),
        qkv_bias=biased or architecture == "Qwen2ForCausalLM",
        output_bias=biased and architecture != "Qwen2ForCausalLM",
        mlp_bias=architecture == "LlamaForCausalLM" and config.boolean("mlp_bias"),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        tied_embeddings=config.boolean("tie_word_embeddings"),
        sliding_window=window,
        sliding_layers=sliding,
        query_scale=config.number("query_pre_attn_scalar") ** -0.5 if gemma else None,
        attention_softcap=config.optional_number("attn_logit_softcapping") if gemma else None,
        logit_softcap=config.optional_number("final_logit_softcapping") if gemma else None,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        norm_plus_one=gemma,
        eos_token_ids=tuple(dict.fromkeys((*config.token_ids("eos_token_id"), *outer_eos, *more_eos))),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        dtype=_dtype(config),
    )


def _architecture(where: str, given: Mapping[str, Any]) -> str:
    named = given.get("architectures") or [given.get("model_type")]
    name = str(named[0]) if isinstance(named, list) else str(named)
    found = ALIASES.get(name, name)
    if found not in DEFAULTS:
        known = ", ".join((*DEFAULTS, "Gemma3ForConditionalGeneration (text only)"))
        raise ModelError(f"{where}: architecture {name!r} is not supported; supported are {known}.")
    return found


def _refuse_unsupported(config: Fields) -> None:
    """What would load and then answer nonsense is refused here."""
    quantisation = config.section("quantization_config")
    if quantisation is not None:
        method = quantisation.text("quant_method", "unnamed")
        raise ModelError(
            f"{config.where}: weights quantised with {method!r} are not supported; use the unquantised model or a GGUF."
        )
    if config.boolean("use_bidirectional_attention"):
        raise ModelError(f"{config.where}: attends in both directions, so it is an encoder and cannot generate text.")


def _sliding(architecture: str, config: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window and which layers it holds for, by each architecture's own rule."""
    window = config.optional_integer("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return None, ()
    if architecture == "MistralForCausalLM":
        return window, (True,) * num_layers
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and not config.boolean("use_sliding_window"):
        return None, ()
    layer_types = config.values.get("layer_types")
    if layer_types is not None:
        slides = _by_layer_type(config, layer_types, num_layers)
    elif architecture == "Gemma3ForCausalLM":
        pattern = config.integer("sliding_window_pattern")
        slides = tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    else:
        first = config.values.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int):
            raise ModelError(f"{config.where}: max_window_layers must be a whole number, got {first!r}.")
        slides = tuple(layer >= first for layer in range(num_layers))
    return (window, slides) if any(slides) else (None, ())


def _by_layer_type(config: Fields, layer_types: Any, num_layers: int) -> tuple[bool, ...]:
    kinds = {"sliding_attention": True, "full_attention": False}
    if not isinstance(layer_types, list) or not set(map(str, layer_types)) <= kinds.keys():
        raise ModelError(f"{config.where}: layer_types may hold {' and '.join(kinds)} only, got {layer_types!r}.")
    if len(layer_types) < num_layers:
        raise ModelError(f"{config.where}: layer_types names {len(layer_types)} of {num_layers} layers.")
    return tuple(kinds[kind] for kind in layer_types[:num_layers])


def _activation(config: Fields, field: str) -> Activation:
    name = config.text(field, "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"{config.where}: {field} {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def _dtype(config: Fields) -> str:
    name = config.text("dtype", config.text("torch_dtype", "bfloat16")).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"{config.where}: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}.")
    return name

"""Puts the metadata of a GGUF file into the form of a Hugging Face config.json, which `config` then reads as usual.

Also owns the names: which tensor of llama.cpp is which tensor of the Hugging Face checkpoint it was converted from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType, LlamaFileType

from bough.core.errors import ModelError
from bough.loader.gguf_file import GgufArray, GgufFile, Value

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral too: llama.cpp does not tell them apart
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# Quantised files do not say what they were made from. bfloat16 has the range for all of them, Gemma's included, which
# float16 has not.
DTYPES = {LlamaFileType.ALL_F32: "float32", LlamaFileType.MOSTLY_F16: "float16"}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
ROPE_FACTORS = "rope_freqs.weight"
GEMMA_27B_LAYERS = 62  # the one Gemma 3 that scales queries by hidden size per head; its GGUF does not say so

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(name: str, architecture: str) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for what is no weight (`rope_freqs.weight`) or unknown."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    match = LAYER_TENSOR.fullmatch(name)
    names = GEMMA_LAYER_NAMES if architecture == "Gemma3ForCausalLM" else LAYER_NAMES
    if match is None or match[2] not in names:
        return None
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


def read_gguf_config(path: Path) -> tuple[dict[str, Any], tuple[float, ...] | None]:
    """A config.json's content, and the divisors of the rope frequencies where the file stores them (Llama 3.1 on)."""
    file = GgufFile.open(path)
    meta = _Metadata(path, file.metadata)
    if meta.name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path}: GGUF architecture {meta.name!r} is not supported; supported are {known}.")
    if meta.get("split.count", 1) != 1:
        raise ModelError(f"{path} is one part of a split GGUF; join the parts with `llama-gguf-split --merge` first.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path} holds no token_embd.weight: it is not a whole model.")
    config = _shape(meta)
    config |= {
        "architectures": [ARCHITECTURES[meta.name]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": DTYPES.get(meta.get("general.file_type", None), "bfloat16"),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": _eos_ids(meta),
    }
    if meta.name == "gemma3":
        config |= _gemma_shape(meta, config)
    return config, _frequency_factors(file)


class _Metadata:
    """The metadata by name; names that begin with a dot belong to the architecture (`llama.block_count`)."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self.values = values
        self.name = str(values.get("general.architecture"))

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.name + key if key.startswith(".") else key, default)
        return self._uniform(key, value) if isinstance(value, GgufArray) else value

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise ModelError(f"{self.path}: the metadata lack {self.name}{key}.")
        return value

    def _uniform(self, key: str, array: GgufArray) -> Any:
        """Some numbers may be given for each layer; models whose layers differ are not supported."""
        distinct = set(array.values())
        if len(distinct) != 1:
            raise ModelError(f"{self.path}: {self.name}{key} differs between layers, which is not supported.")
        return distinct.pop()


def _shape(meta: _Metadata) -> dict[str, Any]:
    heads = meta.need(".attention.head_count")
    head_dim = meta.get(".attention.key_length", meta.need(".embedding_length") // heads)
    rotated = meta.get(".rope.dimension_count", head_dim)
    return {
        "hidden_size": meta.need(".embedding_length"),
        "intermediate_size": meta.need(".feed_forward_length"),
        "num_hidden_layers": meta.need(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.need(".context_length"),
        "rms_norm_eps": meta.need(".attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get(".rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(meta),
        "partial_rotary_factor": rotated / head_dim,
    }


def _rope_scaling(meta: _Metadata) -> dict[str, Any] | None:
    kind = meta.get(".rope.scaling.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": meta.get(".rope.scaling.factor", None),
        "original_max_position_embeddings": meta.get(".rope.scaling.original_context_length", None),
        "beta_fast": meta.get(".rope.scaling.yarn_beta_fast", None),
        "beta_slow": meta.get(".rope.scaling.yarn_beta_slow", None),
    }


def _gemma_shape(meta: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    large = config["num_hidden_layers"] == GEMMA_27B_LAYERS
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": per_head if large else config["head_dim"],
        "sliding_window": meta.get(".attention.sliding_window", None),
        "rope_local_base_freq": meta.get(".rope.freq_base_swa", None),
        "attn_logit_softcapping": meta.get(".attn_logit_softcapping", None),
        "final_logit_softcapping": meta.get(".final_logit_softcapping", None),
    }


def _eos_ids(meta: _Metadata) -> list[int]:
    """The ids that the file names as ends, and the marker that closes a turn in its chat template."""
    named = [meta.get(f"tokenizer.ggml.{role}_token_id", None) for role in ("eos", "eot")]
    found = [token for token in named if token is not None]
    template = str(meta.values.get("tokenizer.chat_template", ""))
    tokens = meta.values.get("tokenizer.ggml.tokens")
    used = [marker for marker in TURN_ENDS if marker in template]
    if used and isinstance(tokens, GgufArray):
        found += [place for marker in used if (place := tokens.find(marker)) is not None]
    return list(dict.fromkeys(found))


def _frequency_factors(file: GgufFile) -> tuple[float, ...] | None:
    info = file.tensors.get(ROPE_FACTORS)
    if info is None:
        return None
    if info.kind != GGMLQuantizationType.F32:
        raise ModelError(f"{file.path}: {ROPE_FACTORS} must be F32, not {info.kind.name}.")
    return tuple(file.raw(info).view(np.float32).ravel().tolist())

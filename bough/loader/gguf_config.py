"""Puts the metadata of a GGUF file into the form of a Hugging Face config.json, which `config` then reads as usual.

Keys that all architectures have are read here; the family adds its own (`ModelFamily.gguf_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType, LlamaFileType

from bough.core.errors import ModelError
from bough.loader.gguf_file import GgufArray, GgufFile, Value
from bough.models.registry import find_gguf_family

# Quantised files do not say what they were made from. bfloat16 has the range for all of them, which float16 has not.
DTYPES = {LlamaFileType.ALL_F32: "float32", LlamaFileType.MOSTLY_F16: "float16"}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
ROPE_FACTORS = "rope_freqs.weight"


def read_gguf_config(path: Path) -> tuple[dict[str, Any], tuple[float, ...] | None]:
    """A config.json's content, and the divisors of the rope frequencies where the file stores them (Llama 3.1 on)."""
    file = GgufFile.open(path)
    meta = _Metadata(path, file.metadata)
    family = find_gguf_family(meta.name, f"{path}: ")
    if meta.get("split.count", 1) != 1:
        raise ModelError(f"{path} is one part of a split GGUF; join the parts with `llama-gguf-split --merge` first.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path} holds no token_embd.weight: it is not a whole model.")
    config = _shape(meta)
    config |= {
        "architectures": list(family.architectures),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "dtype": DTYPES.get(meta.get("general.file_type", None), "bfloat16"),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": _eos_ids(meta),
    }
    config |= family.gguf_fields(meta, config)
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
    layer_norm_eps = meta.get(".attention.layer_norm_epsilon", None)
    return {
        "hidden_size": meta.need(".embedding_length"),
        "intermediate_size": meta.need(".feed_forward_length"),
        "num_hidden_layers": meta.need(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.need(".context_length"),
        "layer_norm_eps": layer_norm_eps,
        "rms_norm_eps": layer_norm_eps or meta.need(".attention.layer_norm_rms_epsilon"),
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

"""Puts the metadata of a GGUF file into the form of a Hugging Face config.json, which `config` then reads as usual.

Keys that all architectures have are read here; the family adds its own (`ModelFamily.gguf_fields`).
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bough.core.errors import ModelError
from bough.core.files import table_beside
from bough.core.gguf_format import GGMLQuantizationType, LlamaFileType
from bough.loader.gguf_file import GgufArray, GgufFile
from bough.models.registry import find_gguf_family

# Quantised files do not say what they were made from. bfloat16 has the range for all of them, which float16 has not.
DTYPES = {LlamaFileType.ALL_F32: "float32", LlamaFileType.MOSTLY_F16: "float16"}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
HARMONY_END = "<|return|>"  # of the one format that goes on after <|end|>
ROPE_FACTORS = "rope_freqs.weight"
MOST_LAYERS = 4096
KEYS = table_beside(__file__, "gguf_keys.toml")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def read_gguf_config(path: Path) -> tuple[dict[str, Any], tuple[float, ...] | None]:
    """A config.json's content, and the divisors of the rope frequencies where the file stores them (Llama 3.1 on)."""
    file = GgufFile.open(path)
    family = find_gguf_family(str(file.metadata.get("general.architecture")), f"{path}: ")
    meta = _Metadata(file, family.gguf_varying)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path} holds no token_embd.weight: it is not a whole model.")
    config: dict[str, Any] = {
        field: value
        for key, fields in KEYS["fields"].items()
        if (value := meta.get(key, None)) is not None
        for field in fields
    }
    kinds = {name.split(".", 2)[-1] if name.startswith("blk.") else name for name in file.tensors}
    config |= {field: not kinds.isdisjoint(names) for field, names in KEYS["shown"].items()}
    config |= _shape(meta) | _layers(meta, config) | {"rope_scaling": _rope_scaling(meta)}
    factors = _floats(file, ROPE_FACTORS)
    config |= {
        "architectures": list(family.architectures),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": DTYPES.get(meta.get("general.file_type", None), "bfloat16"),
        "eos_token_id": _eos_ids(meta),
        "rope_factors": factors,
    }
    config |= {**family.gguf_fields(meta, config), **family.gguf_stated}
    # Under their own names, too: the family has defaults for those.
    config |= {theirs: config[ours] for theirs, ours in family.renamed_fields.items() if ours in config}
    return config, factors


class _Metadata:
    """The metadata by name; names that begin with a dot belong to the architecture (`llama.block_count`)."""

    def __init__(self, file: GgufFile, varying: Collection[str]) -> None:
        self.file, self.path, self.tensors, self.varying = file, file.path, file.tensors, varying
        self.values = file.metadata
        self.name = str(self.values.get("general.architecture"))

    def get(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        return self._uniform(key, value) if isinstance(value, GgufArray) else value

    def raw(self, key: str, default: Any) -> Any:
        """The same, but an array as it is."""
        return self.values.get(self.name + key if key.startswith(".") else key, default)

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise ModelError(f"{self.path}: the metadata lack {self.name}{key}.")
        return value

    def each(self, key: str) -> list[Any]:
        """Of all layers, of which a file that was damaged may name any number."""
        value, layers = self.raw(key, 0), self.need(".block_count")
        if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
            raise ModelError(f"{self.path}: {self.name}.block_count is {layers}, which is no number of layers.")
        return list(value.values()) if isinstance(value, GgufArray) else [value] * layers

    def _uniform(self, key: str, array: GgufArray) -> Any:
        """Some numbers may be given for each layer, zero for those that have none of the kind; models whose layers
        differ otherwise are not supported."""
        distinct = list(dict.fromkeys(value for value in array.values() if value)) or [0]
        if len(distinct) > 1 and key not in self.varying:
            raise ModelError(f"{self.path}: {self.name}{key} differs between layers, which is not supported.")
        return distinct[0]


def _shape(meta: _Metadata) -> dict[str, Any]:
    heads = meta.need(".attention.head_count")
    head_dim = meta.get(".attention.key_length", meta.need(".embedding_length") // heads)
    rotated = meta.get(".rope.dimension_count", head_dim)
    rms = ".attention.layer_norm_rms_epsilon"
    drafting = meta.get(".nextn_predict_layers", 0)  # the file's last layers, which guess tokens ahead
    return {
        "hidden_size": meta.need(".embedding_length"),
        "intermediate_size": meta.get(".feed_forward_length", 0) or meta.need(".expert_feed_forward_length"),
        "num_hidden_layers": meta.need(".block_count") - drafting,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.need(".context_length"),
        **dict.fromkeys(EPSILONS, meta.get(".attention.layer_norm_epsilon", None) or meta.need(rms)),
        "rope_theta": meta.get(".rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotated / head_dim,
    }


def _layers(meta: _Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window, 0 where there is none, and which layers have it, or each how many have not; or which layers
    have a state, and so no key-value heads."""
    windows: dict[str, Any] = {"sliding_window": meta.get(".attention.sliding_window", 0) or None}
    pattern = meta.raw(".attention.sliding_window_pattern", None)
    if isinstance(pattern, GgufArray):
        windows["layer_types"] = [f"{'sliding' if slides else 'full'}_attention" for slides in pattern.values()]
    elif pattern is not None:
        windows["sliding_window_pattern"] = pattern
    if "mamba_n_heads" in given:
        inner = meta.get(".ssm.inner_size", 0)
        sizes = dict.fromkeys(("linear_value_head_dim", "mamba_head_dim"), inner // given["mamba_n_heads"])
        windows |= {"mamba_expand": inner // meta.need(".embedding_length"), **sizes}
    heads = meta.each(".attention.head_count_kv")
    if any(heads) and not all(heads):
        windows["layer_types"] = [f"{'full' if count else 'linear'}_attention" for count in heads]
    return windows


def _rope_scaling(meta: _Metadata) -> dict[str, Any] | None:
    kind = meta.get(".rope.scaling.type", "none")
    long, short = (_floats(meta.file, f"rope_factors_{size}.weight") for size in ("long", "short"))
    if long or short or kind == "longrope":
        sharper = meta.get(".rope.scaling.attn_factor", None)
        factors = {"long_factor": long and list(long), "short_factor": short and list(short)}
        return {"rope_type": "longrope", **factors, "attention_factor": sharper, "long_mscale": sharper}
    if kind == "none":
        return None
    return {"rope_type": kind, **{field: meta.get(key, None) for field, key in KEYS["rope_scaling"].items()}}


def _eos_ids(meta: _Metadata) -> list[int]:
    """The ids that the file names as ends, and the marker that closes a turn in its chat template."""
    named = [meta.get(f"tokenizer.ggml.{role}_token_id", None) for role in ("eos", "eot")]
    found = [token for token in named if token is not None]
    template = str(meta.values.get("tokenizer.chat_template", ""))
    tokens = meta.values.get("tokenizer.ggml.tokens")
    ends = TURN_ENDS[:-1] if HARMONY_END in template else TURN_ENDS
    used = [marker for marker in ends if marker in template]
    if used and isinstance(tokens, GgufArray):
        found += [place for marker in used if (place := tokens.find(marker)) is not None]
    return list(dict.fromkeys(found))


def _floats(file: GgufFile, name: str) -> tuple[float, ...] | None:
    info = file.tensors.get(name)
    if info is None:
        return None
    if info.kind != GGMLQuantizationType.F32:
        raise ModelError(f"{file.path}: {name} must be F32, not {info.kind.name}.")
    return tuple(file.raw(info).view(np.float32).ravel().tolist())

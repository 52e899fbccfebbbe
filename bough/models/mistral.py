"""Mistral: Llama without biases; where there is a sliding window, it holds for all layers. Mixtral has a mixture of
experts instead of the MLP.

Mistral's own files (`consolidated.safetensors`, `params.json`) have other names for fields and tensors, and heads whose
neighbouring coordinates rotate. Ministral and Ministral 3 are Mistral with windows in some layers, or with queries that
grow with their position; Mistral 3 is the multimodal form of Mistral and Ministral 3. MiniMax M2 has Mixtral's names:
experts chosen by corrected sigmoid scores, norms over all query and all key heads, which rotate in part.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.family import MIXTRAL_SIZES, Metadata, ModelFamily, read_moe, window_fields
from bough.models.fields import Fields
from bough.models.names import NESTED, Names, interleaved
from bough.models.rope_config import read_rope

# Of params.json: what would change the forward pass or the weights.
UNREAD = ("moe", "quantization", "yarn", "q_lora_rank", "vision_encoder", "llama_4_scaling", "use_biases")


class Ministral(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qkv_bias": False, "output_bias": False, **window_fields(config, lambda layer: True)}


class Mistral(Ministral):
    def names(self, config: ModelConfig) -> Names:
        attention, dim = "model.layers.*.self_attn", config.head_dim
        return {
            **self.stated_names,
            "layers.*.attention.wq": interleaved(f"{attention}.q_proj", config.num_heads, dim),
            "layers.*.attention.wk": interleaved(f"{attention}.k_proj", config.num_kv_heads, dim),
        }

    def fields(self, config: Fields) -> dict[str, Any]:
        unread = next((name for name in UNREAD if config.values.get(name)), None)
        if unread is not None:
            raise ModelError(f"{config.where}: {unread} is not supported; use the model's Hugging Face files.")
        return super().fields(config)


STATED = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}


class Mixtral(Mistral):
    def fields(self, config: Fields) -> dict[str, Any]:
        section = config.section("moe")  # of params.json
        if section is not None:
            unread = next((name for name, value in section.values.items() if value and name not in STATED), None)
            if unread is not None:
                raise ModelError(f"{section.where}: {unread} is not supported; use the model's Hugging Face files.")
            stated = {field: section.values[name] for name, field in STATED.items() if name in section.values}
            config = Fields(config.where, {**config.values, **stated, "moe": None})
        return {**super().fields(config), "moe": read_moe(config, **MIXTRAL_SIZES)}

    def names(self, config: ModelConfig) -> Names:
        return {**super().names(config), **block_sparse_names(), **block_sparse_names("layers.*.feed_forward")}


def block_sparse_names(theirs: str = "model.layers.*.block_sparse_moe") -> Names:
    """Where Mixtral's checkpoints, and those that are written like them, have their experts."""
    ours = "model.layers.*.mlp"
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    experts = {f"{theirs}.experts.*.{part}": f"{ours}.experts.*.{name}" for part, name in parts.items()}
    return {**experts, f"{theirs}.": f"{ours}."}


class Ministral3(Ministral):
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), "query_growth": _growth(config)}


class Mistral3(Ministral3):
    def names(self, config: ModelConfig) -> Names:
        return NESTED

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp has one name for Mistral 3 and Ministral 3, whose queries grow."""
        rate = meta.get(".attention.temperature_scale", None)
        if rate is None:
            return {}
        sharper = meta.get(".rope.scaling.yarn_log_multiplier", None)
        more = {"llama_4_scaling_beta": rate, "mscale": sharper, "mscale_all_dim": sharper}
        return {
            "architectures": ["Ministral3ForCausalLM"],
            "rope_parameters": {**(given["rope_scaling"] or {}), **more},
        }


def _growth(config: Fields) -> tuple[float, int, int] | None:
    rope = config.section("rope_parameters")
    rate = rope.optional_number("llama_4_scaling_beta") if rope else None
    return (rate, rope.integer("original_max_position_embeddings"), 0) if rope and rate else None


class MiniMaxM2(ModelFamily):
    partial_rotation = True

    def fields(self, config: Fields) -> dict[str, Any]:
        moe = read_moe(config, **MIXTRAL_SIZES, scores="sigmoid", correction_bias=True)
        found: dict[str, Any] = {"moe": moe, "qk_norm": True, "qk_norm_whole": True}
        rotated = config.optional_integer("rotary_dim")  # how published checkpoints say it
        if rotated is not None:
            share = rotated / config.integer("head_dim")
            found["rope"] = replace(read_rope(config, partial=True), partial_rotary_factor=share)
        return found

    def names(self, config: ModelConfig) -> Names:
        bias, blocks = "e_score_correction_bias", ("block_sparse_moe", "mlp")  # of checkpoints, and of Transformers
        stored = [f"model.layers.*.{block}.{bias}" for block in blocks]
        return {**block_sparse_names(), **dict.fromkeys(stored, f"model.layers.*.mlp.gate.{bias}")}

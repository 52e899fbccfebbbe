"""Mistral: Llama without biases; where there is a sliding window, it holds for all layers. Mixtral has a mixture of
experts instead of the MLP.

Mistral's own files (`consolidated.safetensors`, `params.json`) have other names for fields and tensors, and heads whose
neighbouring coordinates rotate.
"""

from __future__ import annotations

from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily, read_moe
from bough.models.fields import Fields
from bough.models.names import Names, interleaved

# Of params.json: what would change the forward pass or the weights.
UNREAD = ("moe", "quantization", "yarn", "q_lora_rank", "vision_encoder", "llama_4_scaling", "use_biases")


class Mistral(ModelFamily):
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
        window = config.optional_integer("sliding_window")
        slides = () if window is None else (True,) * config.integer("num_hidden_layers")
        return {"qkv_bias": False, "output_bias": False, "sliding_window": window, "sliding_layers": slides}


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
        moe = read_moe(config, experts="num_local_experts", size="intermediate_size")
        return {**super().fields(config), "moe": moe}

    def names(self, config: ModelConfig) -> Names:
        return {**super().names(config), **block_sparse_names(), **block_sparse_names("layers.*.feed_forward")}


def block_sparse_names(theirs: str = "model.layers.*.block_sparse_moe") -> Names:
    """Where Mixtral's checkpoints, and those that are written like them, have their experts."""
    ours = "model.layers.*.mlp"
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    experts = {f"{theirs}.experts.*.{part}": f"{ours}.experts.*.{name}" for part, name in parts.items()}
    return {f"{theirs}.gate": f"{ours}.gate", **experts}

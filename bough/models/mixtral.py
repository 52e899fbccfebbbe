"""Mixtral: Mistral with a mixture of experts instead of the MLP."""

from __future__ import annotations

from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.family import read_moe
from bough.models.fields import Fields
from bough.models.mistral import Mistral
from bough.models.names import Names

STATED = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}


class Mixtral(Mistral):
    architectures = ("MixtralForCausalLM",)
    model_types = ("mixtral",)

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

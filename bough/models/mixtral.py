"""Mixtral: Mistral with a mixture of experts instead of the MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import read_moe
from bough.models.fields import Fields
from bough.models.mistral import Mistral
from bough.models.names import Names


class Mixtral(Mistral):
    architectures = ("MixtralForCausalLM",)
    model_types = ("mixtral",)
    defaults: ClassVar[dict[str, Any]] = {
        **Mistral.defaults,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        moe = read_moe(config, experts="num_local_experts", size="intermediate_size")
        return {**super().fields(config), "moe": moe}

    def names(self, config: ModelConfig) -> Names:
        return block_sparse_names()


def block_sparse_names() -> Names:
    """Where Mixtral's checkpoints, and those that are written like them, have their experts."""
    theirs, ours = "model.layers.*.block_sparse_moe", "model.layers.*.mlp"
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    experts = {f"{theirs}.experts.*.{part}": f"{ours}.experts.*.{name}" for part, name in parts.items()}
    return {f"{theirs}.gate": f"{ours}.gate", **experts}

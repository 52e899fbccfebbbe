"""Qwen2 MoE: Qwen2 with a mixture of experts and a shared expert, whose result a gate of its own scales."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.family import read_moe
from bough.models.fields import Fields
from bough.models.names import Names, Piece
from bough.models.qwen2 import Qwen2
from bough.models.qwen3_moe import sparse_steps


class Qwen2Moe(Qwen2):
    architectures = ("Qwen2MoeForCausalLM",)
    model_types = ("qwen2_moe",)
    gguf_architecture = "qwen2moe"
    renamed_fields: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    def fields(self, config: Fields) -> dict[str, Any]:
        moe = shared_experts(config)
        return {**super().fields(config), "qkv_bias": config.boolean("qkv_bias", True), "moe": moe}

    def names(self, config: ModelConfig) -> Names:
        return shared_names()


def shared_experts(config: Fields) -> MoEConfig:
    """Experts beside one that every token passes."""
    return read_moe(
        config,
        renormalise=config.boolean("norm_topk_prob"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=sparse_steps(config),
    )


def shared_names() -> Names:
    """Where the shared expert and its gate stand."""
    theirs, ours = "model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts"
    shared = {f"{theirs}.{part}_proj": f"{ours}.{part}_proj" for part in ("gate", "up", "down")}
    return {f"{theirs}_gate": Piece(f"{theirs}_gate", plane=0), **shared}

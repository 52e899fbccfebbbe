"""Hunyuan 3: norms on each head, and experts that are chosen as GLM-4.5's."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.glm4_moe import COUNTED, corrected_experts
from bough.models.names import Names

PARTS = ("gate_proj", "up_proj", "down_proj")


class HunYuan3(ModelFamily):
    architectures = ("HYV3ForCausalLM",)
    model_types = ("hy_v3",)
    renamed_fields: ClassVar[dict[str, str]] = {
        **COUNTED,
        "router_scaling_factor": "routed_scaling_factor",
    }
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 192,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.826,
        "first_k_dense_replace": 1,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"moe": corrected_experts(config), "qk_norm": True, "mlp_bias": config.boolean("mlp_bias")}

    def names(self, config: ModelConfig) -> Names:
        mlp = "model.layers.*.mlp"
        shared = {f"{mlp}.shared_mlp.{part}": f"{mlp}.shared_experts.{part}" for part in PARTS}
        return {
            f"{mlp}.router.gate": f"{mlp}.gate",
            f"{mlp}.expert_bias": f"{mlp}.gate.e_score_correction_bias",
            **shared,
        }

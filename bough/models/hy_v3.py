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

"""EXAONE MoE: EXAONE 4's windows and heads, norms before attention and MLP, and experts chosen as GLM-4.5's are."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.exaone4 import Exaone4
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.glm4_moe import COUNTED, corrected_experts
from bough.models.names import Names


class ExaoneMoe(Exaone4):
    architectures = ("ExaoneMoeForCausalLM",)
    model_types = ("exaone_moe",)
    gguf_architecture = None
    renamed_fields: ClassVar[dict[str, str]] = COUNTED
    block = ModelFamily.block  # with norms before attention and MLP

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), "moe": corrected_experts(config)}

    def names(self, config: ModelConfig) -> Names:
        name = "e_score_correction_bias"
        return {f"model.layers.*.mlp.{name}": f"model.layers.*.mlp.gate.{name}"}

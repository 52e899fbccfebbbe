"""GLM and GLM-4: half of each head rotates, in pairs of neighbours, and the MLP is fused. GLM-4 has norms after
attention and MLP as well, and GLM-4V and GLM-OCR rotate by time, height and width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.names import GGUF_FUSED_MLP, GGUF_SANDWICH, Names, fused_gate_up, projections_apart
from bough.models.vision import Sectioned


class Glm(ModelFamily):
    gguf_modules: ClassVar[Mapping[str, str]] = GGUF_FUSED_MLP
    partial_rotation = pairs_apart = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"output_bias": False}

    def names(self, config: ModelConfig) -> Names:
        return {**projections_apart(config, neighbours=True), **fused_gate_up(config)}


class Glm4(Glm):
    gguf_modules: ClassVar[Mapping[str, str]] = {**GGUF_FUSED_MLP, **GGUF_SANDWICH}
    block_kind = "SandwichBlock"

    def names(self, config: ModelConfig) -> Names:
        layer = "model.layers.*"
        return {
            **super().names(config),
            f"{layer}.post_self_attn_layernorm": f"{layer}.post_attention_layernorm",
            f"{layer}.post_attention_layernorm": f"{layer}.pre_feedforward_layernorm",
            f"{layer}.post_mlp_layernorm": f"{layer}.post_feedforward_layernorm",
        }


class Glm4v(Sectioned, Glm4):
    pass

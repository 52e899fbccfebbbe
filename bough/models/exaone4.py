"""EXAONE 4: norms after attention and MLP only, and on each head; layers that see everything beside windows do not
rotate. EXAONE MoE has norms before attention and MLP, and experts chosen as GLM-4.5's are."""

from __future__ import annotations

from typing import Any

from bough import layers
from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily, rotating_windows
from bough.models.fields import Fields
from bough.models.glm import corrected_experts
from bough.models.names import GGUF_SANDWICH


class Exaone4(ModelFamily):
    gguf_modules = GGUF_SANDWICH

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.optional_integer("sliding_window") is None:
            return {"qk_norm": True}
        windows = rotating_windows(config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern", 4) != 0)
        return {"qk_norm": True, **windows}

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.SandwichBlock(config, layer, placement, before=False)


class ExaoneMoe(Exaone4):
    block = ModelFamily.block  # with norms before attention and MLP

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), "moe": corrected_experts(config)}

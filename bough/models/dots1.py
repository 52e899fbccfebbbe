"""dots.llm1: Qwen 3's attention, and experts that are chosen as GLM-4.5's. Solar Open has Llama's attention."""

from __future__ import annotations

from typing import Any

from bough.models.family import ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.glm4_moe import corrected_experts


class Dots1(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        windows = window_fields(config, lambda layer: layer >= config.count("max_window_layers"))
        return {"moe": corrected_experts(config), "qk_norm": True, **windows}


class SolarOpen(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"moe": corrected_experts(config), "output_bias": False}

"""EXAONE 4: norms after attention and MLP only, and on each head; layers that see everything beside windows do not
rotate."""

from __future__ import annotations

from typing import Any

from bough import layers
from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily, rotating_windows
from bough.models.fields import Fields
from bough.models.names import GGUF_SANDWICH


class Exaone4(ModelFamily):
    architectures = ("Exaone4ForCausalLM",)
    model_types = ("exaone4",)
    gguf_architecture: str | None = "exaone4"
    gguf_modules = GGUF_SANDWICH

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.optional_integer("sliding_window") is None:
            return {"qk_norm": True}
        windows = rotating_windows(config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern", 4) != 0)
        return {"qk_norm": True, **windows}

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.SandwichBlock(config, layer, placement, before=False)

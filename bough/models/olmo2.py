"""OLMo 2 and 3: norms after attention and MLP only, and one over all query heads and all key heads. OLMo 3 has windows
in three of four layers, which its rotation for long contexts spares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough import layers
from bough.core.model_config import ModelConfig
from bough.models.family import Metadata, ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.names import GGUF_SANDWICH
from bough.models.rope_config import read_local_rope


class Olmo2(ModelFamily):
    architectures = ("Olmo2ForCausalLM",)
    model_types = ("olmo2",)
    gguf_architecture = "olmo2"
    gguf_modules = GGUF_SANDWICH

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qk_norm": True, "qk_norm_whole": True}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp has one name for both."""
        return {"architectures": list(Olmo3.architectures)} if given["sliding_window"] else {}

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.SandwichBlock(config, layer, placement, before=False)


class Olmo3(Olmo2):
    architectures = ("Olmo3ForCausalLM",)
    model_types = ("olmo3",)

    def fields(self, config: Fields) -> dict[str, Any]:
        local = read_local_rope(config.renamed({"rope_theta": "rope_local_base_freq"}))
        windows = window_fields(config, lambda layer: (layer + 1) % 4 != 0)
        return {**super().fields(config), "local_rope": local, **windows}

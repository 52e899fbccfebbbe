"""Ministral and Ministral 3: Mistral with windows in some layers, or with queries that grow with their position.

Mistral 3 is the multimodal form of Mistral and Ministral 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import Metadata, ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.names import NESTED, Names


class Ministral(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qkv_bias": False, "output_bias": False, **window_fields(config, lambda layer: True)}


class Ministral3(Ministral):
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), "query_growth": _growth(config)}


class Mistral3(Ministral3):
    def names(self, config: ModelConfig) -> Names:
        return NESTED

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp has one name for Mistral 3 and Ministral 3, whose queries grow."""
        rate = meta.get(".attention.temperature_scale", None)
        if rate is None:
            return {}
        sharper = meta.get(".rope.scaling.yarn_log_multiplier", None)
        more = {"llama_4_scaling_beta": rate, "mscale": sharper, "mscale_all_dim": sharper}
        return {
            "architectures": ["Ministral3ForCausalLM"],
            "rope_parameters": {**(given["rope_scaling"] or {}), **more},
        }


def _growth(config: Fields) -> tuple[float, int, int] | None:
    rope = config.section("rope_parameters")
    rate = rope.optional_number("llama_4_scaling_beta") if rope else None
    return (rate, rope.integer("original_max_position_embeddings"), 0) if rope and rate else None

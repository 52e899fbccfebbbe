"""Ministral and Ministral 3: Mistral with windows in some layers, or with queries that grow with their position.

Mistral 3 is the multimodal form of Mistral and Ministral 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import Metadata, ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.mistral import Mistral
from bough.models.names import NESTED, Names


class Ministral(ModelFamily):
    architectures = ("MinistralForCausalLM",)
    model_types = ("ministral",)
    defaults = Mistral.defaults

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qkv_bias": False, "output_bias": False, **window_fields(config, lambda layer: True)}


class Mistral3(Ministral):
    architectures = ("Mistral3ForConditionalGeneration",)
    model_types = ("mistral3",)
    encoder = "Mistral3ForConditionalGeneration"
    gguf_architecture = "mistral3"
    gguf_interleaved = True
    defaults: ClassVar[dict[str, Any]] = {**Mistral.defaults, "sliding_window": None}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), "query_growth": _growth(config)}

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
            "architectures": list(Ministral3.architectures),
            "rope_parameters": {**(given["rope_scaling"] or {}), **more},
        }


class Ministral3(Ministral):
    architectures = ("Ministral3ForCausalLM",)
    model_types = ("ministral3",)
    gguf_architecture = "mistral3"
    gguf_interleaved = True
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), "query_growth": _growth(config)}


def _growth(config: Fields) -> tuple[float, int, int] | None:
    rope = config.section("rope_parameters")
    rate = rope.optional_number("llama_4_scaling_beta") if rope else None
    return (rate, rope.integer("original_max_position_embeddings"), 0) if rope and rate else None

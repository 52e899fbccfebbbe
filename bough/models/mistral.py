"""Mistral: Llama without biases; where there is a sliding window, it holds for all layers."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.models.family import ModelFamily
from bough.models.fields import Fields


class Mistral(ModelFamily):
    architectures = ("MistralForCausalLM",)
    model_types = ("mistral",)
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        window = config.optional_integer("sliding_window")
        slides = () if window is None else (True,) * config.integer("num_hidden_layers")
        return {"qkv_bias": False, "output_bias": False, "sliding_window": window, "sliding_layers": slides}

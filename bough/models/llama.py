"""Llama: the model that other families are described against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.models.family import Metadata, ModelFamily
from bough.models.fields import Fields


class Llama(ModelFamily):
    architectures = ("LlamaForCausalLM",)
    model_types = ("llama",)
    gguf_architecture = "llama"
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("mlp_bias")}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp does not tell Mistral apart, and Mixtral only by its experts."""
        return {"architectures": ["MixtralForCausalLM"]} if meta.get(".expert_count", 0) else {}

"""OLMo: Llama with layer norms that have neither weights nor biases."""

from __future__ import annotations

from typing import Any

from bough.core.errors import ModelError
from bough.models.family import ModelFamily
from bough.models.fields import Fields


class Olmo(ModelFamily):
    architectures = ("OlmoForCausalLM",)
    model_types = ("olmo",)
    gguf_architecture = "olmo"
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.optional_number("clip_qkv") is not None:
            raise ModelError(f"{config.where}: clip_qkv is not supported; OLMo 2 and 3 have none.")
        return {"norm": "layer", "norm_weight": False, "norm_eps": 1e-5}

"""OLMo: Llama with layer norms that have neither weights nor biases."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.models.family import ModelFamily
from bough.models.fields import Fields


class Olmo(ModelFamily):
    architectures = ("OlmoForCausalLM",)
    model_types = ("olmo",)
    gguf_architecture = "olmo"
    gguf_interleaved = True
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048, "eos_token_id": 50_279}

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.optional_number("clip_qkv") is not None:
            raise ModelError(f"{config.where}: clip_qkv is not supported; OLMo 2 and 3 have none.")
        return {"norm": "layer", "norm_weight": False, "norm_eps": 1e-5}

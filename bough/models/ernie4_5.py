"""ERNIE 4.5 and Helium: Llama whose heads rotate neighbours."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, projections_apart


class Ernie45(ModelFamily):
    architectures = ("Ernie4_5ForCausalLM",)
    model_types = ("ernie4_5",)
    gguf_architecture: str | None = "ernie4_5"
    pairs_apart = True
    renamed_fields: ClassVar = {"use_bias": "attention_bias"}
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("use_bias")}

    def names(self, config: ModelConfig) -> Names:
        return projections_apart(config, neighbours=True)


class Helium(Ernie45):
    architectures = ("HeliumForCausalLM",)
    model_types = ("helium",)
    gguf_architecture = None
    renamed_fields: ClassVar = {}
    defaults: ClassVar[dict[str, Any]] = {
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rope_theta": 100_000.0,
        "rms_norm_eps": 1e-8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("mlp_bias"), "output_bias": False}

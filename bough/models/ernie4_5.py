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

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("use_bias")}

    def names(self, config: ModelConfig) -> Names:
        return projections_apart(config, neighbours=True)


class Helium(Ernie45):
    architectures = ("HeliumForCausalLM",)
    model_types = ("helium",)
    gguf_architecture = None
    renamed_fields: ClassVar = {}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("mlp_bias"), "output_bias": False}

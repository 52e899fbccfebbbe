"""StableLM: Llama with layer norms, of whose heads a quarter rotates; attention and MLP may be side by side."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.family import layer_norms
from bough.models.fields import Fields
from bough.models.gpt_neox import GptNeoX
from bough.models.names import Names, projections_apart


class StableLm(GptNeoX):
    architectures = ("StableLmForCausalLM",)
    model_types = ("stablelm",)
    gguf_architecture = "stablelm"
    one_norm = True
    renamed_fields: ClassVar = {}

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("qk_layernorm"):
            raise ModelError(f"{config.where}: qk_layernorm is not supported; StableLM models up to 3B have none.")
        biases = {"qkv_bias": config.boolean("use_qkv_bias"), "output_bias": False}
        return {**layer_norms(config), **biases, "parallel_residual": config.boolean("use_parallel_residual")}

    def names(self, config: ModelConfig) -> Names:
        return projections_apart(config)

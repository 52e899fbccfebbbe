"""OLMoE: Llama with a mixture of experts, and a norm over all query heads and one over all key heads. FlexOlmo has, as
OLMo 2, norms after attention and experts only."""

from __future__ import annotations

from typing import Any, ClassVar

from bough import layers
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily, read_moe
from bough.models.fields import Fields


class Olmoe(ModelFamily):
    architectures = ("OlmoeForCausalLM",)
    model_types = ("olmoe",)
    gguf_architecture: str | None = "olmoe"
    renamed_fields: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.optional_number("clip_qkv") is not None:
            raise ModelError(f"{config.where}: clip_qkv is not supported; the published OLMoE models have none.")
        moe = read_moe(config, size="intermediate_size", renormalise=config.boolean("norm_topk_prob"))
        return {"moe": moe, "qk_norm": True, "qk_norm_whole": True}


class FlexOlmo(Olmoe):
    architectures = ("FlexOlmoForCausalLM",)
    model_types = ("flex_olmo",)
    gguf_architecture = None

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.SandwichBlock(config, layer, placement, before=False)

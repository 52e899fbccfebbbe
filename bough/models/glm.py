"""GLM and GLM-4: half of each head rotates, in pairs of neighbours, and the MLP is fused. GLM-4 has norms after
attention and MLP as well, and GLM-4V and GLM-OCR rotate by time, height and width. GLM-4.5 MoE has experts chosen by
corrected sigmoid scores, behind some dense layers. dots.llm1 has Qwen 3's attention and Solar Open Llama's, with
experts that are chosen so.

Hunyuan: Llama with a norm on each query and key head, after their rotation. Hunyuan MoE has a mixture of experts and
one that every token passes; Hunyuan 3 has experts that are chosen as GLM-4.5's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.deepseek_v2 import corrected_experts
from bough.models.family import Metadata, ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.names import GGUF_FUSED_MLP, Names, Piece, fused_gate_up, pairs_apart
from bough.models.vision import Sectioned


class Glm(ModelFamily):
    gguf_modules: ClassVar[Mapping[str, str]] = GGUF_FUSED_MLP
    partial_rotation = pairs_apart = neighbours = True

    def names(self, config: ModelConfig) -> Names:
        return {**super().names(config), **fused_gate_up(config)}


class Glm4v(Sectioned, Glm):
    pass


HEAD_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")


class Glm4Moe(ModelFamily):
    partial_rotation = pairs_apart = True

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """Solar Open, which llama.cpp does not tell apart, may have no dense layers and then does not say so."""
        return {"first_k_dense_replace": given.get("first_k_dense_replace", 0)}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"moe": corrected_experts(config), "qk_norm": config.boolean("use_qk_norm"), "output_bias": False}

    def names(self, config: ModelConfig) -> Names:
        """Queries and keys, and the norms of their heads."""
        attention, head = "model.layers.*.self_attn", replace(config, num_heads=1, num_kv_heads=1)
        query, key, query_norm, key_norm = (Piece(f"{attention}.{part}") for part in HEAD_PARTS)
        apart = [*pairs_apart(query, key, config), *pairs_apart(query_norm, key_norm, head)]
        return {piece.module: piece for piece in apart}


class Glm4vMoe(Sectioned, Glm4Moe):
    """GLM-4.5V: rotates by time, height and width."""


class Dots1(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        windows = window_fields(config, lambda layer: layer >= config.count("max_window_layers"))
        return {"moe": corrected_experts(config), "qk_norm": True, **windows}


class CorrectedExperts(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"moe": corrected_experts(config)}


class HunYuanMoe(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        inner = config.integer("intermediate_size")
        moe = MoEConfig(
            experts=_of_all_layers(config, "num_experts"),
            per_token=_of_all_layers(config, "moe_topk"),
            intermediate_size=inner,
            shared_size=inner,
        )
        return {"moe": moe}


def _of_all_layers(config: Fields, name: str) -> int:
    """A number that may be given for each layer, where they are all the same."""
    given = config.token_ids(name) or (1,)
    if len(set(given)) != 1:
        raise ModelError(f"{config.where}: {name} differs between layers, which is not supported.")
    return given[0]

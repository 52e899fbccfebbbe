"""Qwen3.5: Qwen3-Next with its projections side by side, with a plain MLP or with experts.

Checkpoints are multimodal: attention rotates by time, height and width of a token.
"""

from __future__ import annotations

from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.fields import Fields
from bough.models.names import Names, fused, fused_experts, nested
from bough.models.qwen2 import shared_experts, shared_names
from bough.models.qwen3_next import NET, Qwen3Next, attention_names, net_fields, net_names, projections
from bough.models.vision import Sectioned


class Qwen35(Sectioned, Qwen3Next):
    alternating = (11, 11, 10)

    def fields(self, config: Fields) -> dict[str, Any]:
        return net_fields(config)

    def names(self, config: ModelConfig) -> Names:
        net = config.recurrent
        assert net is not None
        keys = net.key_heads * net.key_dim
        return nested(
            {
                **attention_names(config),
                **net_names(net),
                f"{NET}.in_proj_qkv": fused(projections("qkv"), (keys, keys, net.heads * net.value_dim)),
                **dict(zip((f"{NET}.in_proj_{part}" for part in "zba"), projections("zba"), strict=True)),
            }
        )


class Qwen35Moe(Qwen35):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {**net_fields(config), "moe": shared_experts(config)}

    def names(self, config: ModelConfig) -> Names:
        assert config.moe is not None
        experts = fused_experts("model.layers.*.mlp.experts", config.moe)
        return nested({**super().names(config), **shared_names(), **experts})

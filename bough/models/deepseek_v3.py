"""DeepSeek V3 and R1, Kimi K2: V2 with another choice of experts. Layers that predict further tokens are left out. V3.2
is V3 with sparse attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import IndexConfig
from bough.models.deepseek_v2 import DeepseekV2, expert_groups
from bough.models.fields import Fields


class DeepseekV3(DeepseekV2):
    def routing(self, config: Fields) -> dict[str, Any]:
        return {
            "scores": "sigmoid",
            "renormalise": config.boolean("norm_topk_prob"),
            "correction_bias": True,
            "group_score": "best_two",
            **expert_groups(config),
        }


class DeepseekV32(DeepseekV3):
    def fields(self, config: Fields) -> dict[str, Any]:
        fields = super().fields(config)
        if fields["latent"].query_rank is None:
            raise ModelError(f"{config.where}: sparse attention needs a q_lora_rank.")
        index = IndexConfig(
            heads=config.integer("index_n_heads"),
            head_dim=config.integer("index_head_dim"),
            top=config.integer("index_topk"),
            layers=self.choosing_layers(config),
        )
        if index.head_dim < fields["latent"].rope_dim:
            raise ModelError(f"{config.where}: index_head_dim is smaller than qk_rope_head_dim, which rotates in it.")
        return {**fields, "latent": replace(fields["latent"], index=index)}

    def choosing_layers(self, config: Fields) -> tuple[bool, ...]:
        """Of an `IndexConfig`."""
        return ()

"""DeepSeek V3 and R1, Kimi K2: V2 with another choice of experts. Layers that predict further tokens are left out."""

from __future__ import annotations

from typing import Any

from bough.models.deepseek_v2 import DeepseekV2, expert_groups
from bough.models.fields import Fields


class DeepseekV3(DeepseekV2):
    architectures: tuple[str, ...] = ("DeepseekV3ForCausalLM",)
    model_types: tuple[str, ...] = ("deepseek_v3", "kimi_k2")

    def routing(self, config: Fields) -> dict[str, Any]:
        return {
            "scores": "sigmoid",
            "renormalise": config.boolean("norm_topk_prob"),
            "correction_bias": True,
            "group_score": "best_two",
            **expert_groups(config),
        }

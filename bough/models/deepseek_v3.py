"""DeepSeek V3 and R1, Kimi K2: V2 with another choice of experts. Layers that predict further tokens are left out."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.models.deepseek_v2 import LATENT, DeepseekV2, expert_groups
from bough.models.fields import Fields


class DeepseekV3(DeepseekV2):
    architectures: tuple[str, ...] = ("DeepseekV3ForCausalLM",)
    model_types: tuple[str, ...] = ("deepseek_v3", "kimi_k2")
    defaults: ClassVar[dict[str, Any]] = {
        **LATENT,
        "vocab_size": 129_280,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
    }

    def routing(self, config: Fields) -> dict[str, Any]:
        return {
            "scores": "sigmoid",
            "renormalise": config.boolean("norm_topk_prob"),
            "correction_bias": True,
            "group_score": "best_two",
            **expert_groups(config),
        }

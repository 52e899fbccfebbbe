"""GLM-4.7 Flash: DeepSeek V3 in another size."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.models.deepseek_v3 import DeepseekV3
from bough.models.glm4_moe import ROUTED


class Glm4MoeLite(DeepseekV3):
    architectures: tuple[str, ...] = ("Glm4MoeLiteForCausalLM",)
    model_types: tuple[str, ...] = ("glm4_moe_lite",)
    gguf_architecture = None
    renamed_fields: ClassVar[dict[str, str]] = ROUTED
    defaults: ClassVar[dict[str, Any]] = {
        **DeepseekV3.defaults,
        "vocab_size": 154_880,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    }

"""GLM-4.5 MoE: experts chosen by corrected sigmoid scores, behind some dense layers; half of each head rotates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.deepseek_v2 import dense_layers, expert_groups
from bough.models.family import Metadata, ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, Piece, pairs_apart

ROUTED = {"num_local_experts": "n_routed_experts"}  # what Transformers 5 writes
COUNTED = {**ROUTED, "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
HEAD_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")


class Glm4Moe(ModelFamily):
    architectures = ("Glm4MoeForCausalLM",)
    model_types = ("glm4_moe",)
    gguf_architecture = "glm4moe"
    partial_rotation = pairs_apart = True
    renamed_fields: ClassVar[dict[str, str]] = ROUTED
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"moe": corrected_experts(config), "qk_norm": config.boolean("use_qk_norm"), "output_bias": False}

    def names(self, config: ModelConfig) -> Names:
        return _heads_apart(config, *(f"model.layers.*.self_attn.{part}" for part in HEAD_PARTS))

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        keys = {
            "n_routed_experts": ".expert_count",
            "num_experts_per_tok": ".expert_used_count",
            "n_shared_experts": ".expert_shared_count",
            "moe_intermediate_size": ".expert_feed_forward_length",
            "first_k_dense_replace": ".leading_dense_block_count",
            "routed_scaling_factor": ".expert_weights_scale",
            "norm_topk_prob": ".expert_weights_norm",
        }
        drafting = meta.get(".nextn_predict_layers", 0)  # the file's last layers, which guess tokens ahead
        return {
            **{field: meta.get(key, None) for field, key in keys.items()},
            "num_hidden_layers": given["num_hidden_layers"] - drafting,
        }

    def gguf_names(self, config: ModelConfig) -> Names:
        return {
            **super().gguf_names(config),
            **_heads_apart(config, *(f"blk.*.attn_{part}" for part in ("q", "k", "q_norm", "k_norm"))),
            "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
        }


def corrected_experts(config: Fields) -> MoEConfig:
    """Experts that are chosen by sigmoid scores and a correction of these, and weighed without it."""
    inner = config.integer("moe_intermediate_size")
    return MoEConfig(
        experts=config.integer("n_routed_experts"),
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=inner,
        scores="sigmoid",
        renormalise=config.boolean("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        group_score="best_two",
        correction_bias=True,
        shared_size=inner * (config.optional_integer("n_shared_experts") or 0),
        dense_layers=dense_layers(config),
        **expert_groups(config),
    )


def _heads_apart(config: ModelConfig, *stored: str) -> Names:
    """Queries and keys, and the norms of their heads, by the names that they are stored under."""
    query, key, query_norm, key_norm = (Piece(f"model.layers.*.self_attn.{part}") for part in HEAD_PARTS)
    norms = pairs_apart(query_norm, key_norm, replace(config, num_heads=1, num_kv_heads=1))
    return dict(zip(stored, [*pairs_apart(query, key, config), *norms], strict=True))

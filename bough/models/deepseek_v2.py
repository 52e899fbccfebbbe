"""DeepSeek V2: latent attention, and experts behind some dense layers. V2-Lite projects its queries in one step."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import LatentConfig, ModelConfig, MoEConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, Piece, interleaved_rows
from bough.models.rope_config import score_factor

LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


class DeepseekV2(ModelFamily):
    architectures: tuple[str, ...] = ("DeepseekV2ForCausalLM",)
    model_types: tuple[str, ...] = ("deepseek_v2",)
    defaults: ClassVar[dict[str, Any]] = {
        **LATENT,
        "vocab_size": 102_400,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("attention_bias"):
            raise ModelError(f"{config.where}: attention_bias is not supported with latent attention.")
        latent = LatentConfig(
            rank=config.integer("kv_lora_rank"),
            rope_dim=config.integer("qk_rope_head_dim"),
            nope_dim=config.integer("qk_nope_head_dim"),
            value_dim=config.integer("v_head_dim"),
            query_rank=config.optional_integer("q_lora_rank"),
            interleaved=config.boolean("rope_interleave", True),
        )
        head_dim = latent.nope_dim + latent.rope_dim
        return {
            "latent": latent,
            "head_dim": head_dim,
            "num_kv_heads": 1,
            "query_scale": head_dim**-0.5 * score_factor(config),
            "moe": MoEConfig(
                experts=config.integer("n_routed_experts"),
                per_token=config.integer("num_experts_per_tok"),
                intermediate_size=config.integer("moe_intermediate_size"),
                scale=config.number("routed_scaling_factor", 1.0),
                shared_size=(config.optional_integer("n_shared_experts") or 0)
                * config.integer("moe_intermediate_size"),
                dense_layers=dense_layers(config),
                **self.routing(config),
            ),
        }

    def routing(self, config: Fields) -> dict[str, Any]:
        """How experts are chosen: fields of a `MoEConfig`."""
        method = config.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelError(f"{config.where}: topk_method {method!r} is not supported.")
        groups = {} if method == "greedy" else expert_groups(config)
        return {"renormalise": False, **groups}

    def names(self, config: ModelConfig) -> Names:
        """Here halves are rotated, which checkpoints have in neighbouring pairs."""
        latent, attention = config.latent, "model.layers.*.self_attn"
        assert latent is not None
        if not latent.interleaved:
            return {}
        queries = tuple(interleaved_rows(config.num_heads, config.head_dim, slice(latent.nope_dim, None)))
        projection = f"{attention}.{'q_proj' if latent.query_rank is None else 'q_b_proj'}"
        keys = f"{attention}.kv_a_proj_with_mqa"
        return {
            projection: Piece(projection, queries),
            keys: Piece(keys, tuple(interleaved_rows(1, latent.width, slice(latent.rank, None)))),
        }


def expert_groups(config: Fields) -> dict[str, Any]:
    """Fields of a `MoEConfig` whose experts are chosen group by group."""
    groups, kept = config.integer("n_group"), config.integer("topk_group")
    experts = config.integer("n_routed_experts")
    if experts % groups or kept > groups:
        raise ModelError(f"{config.where}: {experts} experts do not make {groups} groups of which {kept} are kept.")
    return {"groups": groups, "top_groups": kept}


def dense_layers(config: Fields) -> tuple[bool, ...]:
    """Which layers have no experts: those listed, or the first few and all but each so-manieth."""
    layers, kinds = config.integer("num_hidden_layers"), config.values.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
            raise ModelError(
                f"{config.where}: mlp_layer_types must say dense or sparse for {layers} layers: {kinds!r}."
            )
        return tuple(kind == "dense" for kind in kinds[:layers])
    first, step = config.values.get("first_k_dense_replace") or 0, config.integer("moe_layer_freq", 1)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ModelError(f"{config.where}: first_k_dense_replace must be a whole number, got {first!r}.")
    dense = tuple(layer < first or layer % step != 0 for layer in range(layers))
    return dense if any(dense) else ()

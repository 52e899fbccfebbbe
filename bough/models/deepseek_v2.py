"""DeepSeek V2: latent attention, and experts behind some dense layers. V2-Lite projects its queries in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import LatentConfig, ModelConfig, MoEConfig
from bough.models.family import Metadata, ModelFamily, read_moe
from bough.models.fields import Fields
from bough.models.names import GGUF_MODULES, Names, Piece, interleaved_rows
from bough.models.rope_config import score_factor

GGUF_SIGMOID = 2  # llama.cpp's number for the scores
GGUF_V3_EXPERTS = 256  # their groups are not in older files; Kimi has more experts, and no groups


class DeepseekV2(ModelFamily):
    gguf_modules = GGUF_MODULES["latent"]

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
            "moe": self.experts(config),
        }

    def experts(self, config: Fields) -> MoEConfig:
        shared = config.optional_integer("n_shared_experts") or 0
        return read_moe(
            config,
            experts="n_routed_experts",
            scale=config.number("routed_scaling_factor", 1.0),
            shared_size=shared * config.integer("moe_intermediate_size"),
            dense_layers=dense_layers(config),
            **self.routing(config),
        )

    def routing(self, config: Fields) -> dict[str, Any]:
        """How experts are chosen: fields of a `MoEConfig`."""
        method = config.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelError(f"{config.where}: topk_method {method!r} is not supported.")
        groups = {} if method == "greedy" else expert_groups(config)
        return {"renormalise": False, **groups}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp has one name for V2 and V3, of which V3 scores experts by sigmoids. Files from before latent
        attention was computed there have the sizes of heads under other keys."""
        latent = "_mla" if meta.get(".attention.key_length_mla", None) else ""
        rope_dim = meta.need(".rope.dimension_count")
        found: dict[str, Any] = {
            "q_lora_rank": given.get("q_lora_rank"),
            "qk_rope_head_dim": rope_dim,
            "qk_nope_head_dim": meta.need(f".attention.key_length{latent}") - rope_dim,
            "v_head_dim": meta.need(f".attention.value_length{latent}"),
            "num_key_value_heads": given["num_attention_heads"],
            "partial_rotary_factor": 1.0,
            "topk_method": "group_limited_greedy" if given.get("n_group", 1) > 1 else "greedy",
        }
        sharper = meta.get(".rope.scaling.yarn_log_multiplier", None)
        if sharper and given["rope_scaling"]:
            found["rope_scaling"] = {**given["rope_scaling"], "mscale": 10 * sharper, "mscale_all_dim": 10 * sharper}
        if meta.get(".expert_gating_func", None) == GGUF_SIGMOID:
            found |= {"architectures": ["DeepseekV3ForCausalLM"], "norm_topk_prob": given.get("norm_topk_prob", False)}
            if "n_group" not in given and given["n_routed_experts"] != GGUF_V3_EXPERTS:
                found |= {"n_group": 1, "topk_group": 1}
        return found

    def gguf_names(self, config: ModelConfig) -> Names:
        """In most files the two halves of `kv_b_proj` stand apart, one of them transposed: a plane for each head."""
        heads, whole = range(config.num_heads), "model.layers.*.self_attn.kv_b_proj"
        return {
            **super().gguf_names(config),
            "blk.*.attn_k_b": [Piece(whole, plane=head, transposed=True, place=2 * head) for head in heads],
            "blk.*.attn_v_b": [Piece(whole, plane=head, place=2 * head + 1) for head in heads],
        }

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


class DeepseekOcr2(DeepseekV2):
    """Llama with the experts of V2."""

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"moe": self.experts(config)}

    def names(self, config: ModelConfig) -> Names:
        return {}


def expert_groups(config: Fields) -> dict[str, Any]:
    """Fields of a `MoEConfig` whose experts are chosen group by group."""
    groups, kept = config.integer("n_group", 1), config.integer("topk_group", 1)
    experts = config.integer("n_routed_experts")
    if experts % groups or kept > groups:
        raise ModelError(f"{config.where}: {experts} experts do not make {groups} groups of which {kept} are kept.")
    return {"groups": groups, "top_groups": kept}


def dense_layers(config: Fields) -> tuple[bool, ...]:
    """Which layers have no experts: those that are listed as dense, or the first few, and all but each so-manieth."""
    types, layers = config.values.get("mlp_layer_types"), range(config.integer("num_hidden_layers"))
    if types is not None:
        if not isinstance(types, list) or len(types) < len(layers) or not {*types} <= {"dense", "sparse"}:
            raise ModelError(f"{config.where}: mlp_layer_types must say dense or sparse for each layer, got {types!r}.")
        return tuple(types[layer] == "dense" for layer in layers) if "dense" in types else ()
    first, step = config.values.get("first_k_dense_replace") or 0, config.integer("moe_layer_freq", 1)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ModelError(f"{config.where}: first_k_dense_replace must be a whole number, got {first!r}.")
    dense = tuple(layer < first or layer % step != 0 for layer in layers)
    return dense if any(dense) else ()

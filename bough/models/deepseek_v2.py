"""DeepSeek V2: latent attention, and experts behind some dense layers. V2-Lite projects its queries in one step. V3 and
R1, Kimi K2: V2 with another choice of experts. Layers that predict further tokens are left out. V3.2 is V3 with sparse
attention; in GLM-5, of its form, some layers attend to the tokens that the layer before chose. Kimi Linear has Kimi's
delta attention in most layers, latent attention without positions in the others; the experts of V3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, IndexConfig, LatentConfig, ModelConfig, MoEConfig, RecurrentConfig
from bough.models.family import Metadata, ModelFamily, layers_of_type, read_moe
from bough.models.fields import Fields
from bough.models.mistral import block_sparse_names
from bough.models.names import GGUF_MODULES, GgufNames, Names, Piece, interleaved_rows
from bough.models.qwen import KINDS
from bough.models.rope_config import score_factor

GGUF_SIGMOID = 2  # llama.cpp's number for the scores
GGUF_V3_EXPERTS = 256  # their groups are not in older files; Kimi has more experts, and no groups


class DeepseekV2(ModelFamily):
    gguf_modules = GGUF_MODULES["latent"]

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("attention_bias"):
            raise self.refusal(config, "attention_bias")
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
        method = config.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise self.refusal(config, "topk_method", "supported are greedy, group_limited_greedy")
        return grouped_experts(config, renormalise=False, **({} if method == "greedy" else expert_groups(config)))

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
        if meta.get(".expert_gating_func", None) == GGUF_SIGMOID or given["use_expert_bias"]:
            named = given["architectures"] if isinstance(self, DeepseekV3) else ["DeepseekV3ForCausalLM"]
            found |= {"architectures": named, "norm_topk_prob": given.get("norm_topk_prob", False)}
            if "n_group" not in given and given["n_routed_experts"] != GGUF_V3_EXPERTS:
                found |= {"n_group": 1, "topk_group": 1}
        return found

    def gguf_names(self, config: ModelConfig) -> GgufNames:
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
        if latent is None or not latent.interleaved:
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
    first, step = config.count("first_k_dense_replace", 0), config.integer("moe_layer_freq", 1)
    dense = tuple(layer < first or layer % step != 0 for layer in layers)
    return dense if any(dense) else ()


def grouped_experts(config: Fields, **routing: Any) -> MoEConfig:
    """Experts beside those that every token passes; `routing` says how they are chosen."""
    return read_moe(
        config,
        experts="n_routed_experts",
        scale=config.number("routed_scaling_factor", 1.0),
        shared_size=config.integer("moe_intermediate_size") * config.count("n_shared_experts", 0),
        dense_layers=dense_layers(config),
        **routing,
    )


def corrected_experts(config: Fields, *, renormalise: bool = True) -> MoEConfig:
    """Experts that are chosen by sigmoid scores and a correction of these, and weighed without it. `renormalise` is
    what the model does where its configuration does not say."""
    renormalise = config.boolean("norm_topk_prob", renormalise)
    scores: dict[str, Any] = {"scores": "sigmoid", "group_score": "best_two", "correction_bias": True}
    return grouped_experts(config, renormalise=renormalise, **scores, **expert_groups(config))


class DeepseekV3(DeepseekV2):
    def experts(self, config: Fields) -> MoEConfig:
        return corrected_experts(config, renormalise=False)


class DeepseekV32(DeepseekV3):
    gguf_modules: ClassVar[Mapping[str, str]] = {**GGUF_MODULES["latent"], **GGUF_MODULES["index"]}

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


INDEXERS = {"full": True, "F": True, "shared": False, "S": False}


class GlmMoeDsa(DeepseekV32):
    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """Layers without an index share the choice of those before."""
        chooses = (f"blk.{layer}.indexer.proj.weight" in meta.tensors for layer in range(given["num_hidden_layers"]))
        return {**super().gguf_fields(meta, given), "indexer_types": ["full" if own else "shared" for own in chooses]}

    def choosing_layers(self, config: Fields) -> tuple[bool, ...]:
        layers, kinds = config.integer("num_hidden_layers"), config.values.get("indexer_types")
        kinds = config.values.get("index_topk_pattern") if kinds is None else kinds
        if kinds is None:
            step, first = max(config.count("index_topk_freq", 1), 1), config.count("index_skip_topk_offset", 2)
            return tuple(max(layer - first + 1, 0) % step == 0 for layer in range(layers))
        if not isinstance(kinds, (str, list)) or len(kinds) < layers or not set(map(str, kinds)) <= INDEXERS.keys():
            text = f"{config.where}: indexer_types must say full or shared for {layers} layers, got {kinds!r}."
            raise ModelError(text)
        if not INDEXERS[kinds[0]]:
            raise ModelError(f"{config.where}: the first layer has no other whose choice of tokens it could share.")
        return tuple(INDEXERS[kind] for kind in kinds[:layers])

    def names(self, config: ModelConfig) -> Names:
        """The index rotates neighbouring pairs too, of the first coordinates of each of its heads."""
        assert config.latent is not None and config.latent.index is not None
        index, turned = config.latent.index, config.latent.rope_dim
        module = "model.layers.*.self_attn.indexer"
        heads = {"wq_b": index.heads, "wk": 1, "k_norm": 1}
        rows = {part: tuple(interleaved_rows(count, index.head_dim, slice(turned))) for part, count in heads.items()}
        return {
            **super().names(config),
            **{f"{module}.{part}": Piece(f"{module}.{part}", order) for part, order in rows.items()},
        }


class KimiLinear(DeepseekV3):
    recurrent_kind = "KimiDelta"
    gguf_modules: ClassVar[Mapping[str, str]] = {
        **GGUF_MODULES["latent"],
        "blk.*.ssm_norm": "model.layers.*.self_attn.o_norm",
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        found, nested = super().fields(config), config.section("linear_attn_config")
        heads, size = config.integer("linear_num_heads"), config.integer("linear_head_dim")
        width = config.integer("linear_conv_kernel_dim")
        if nested is not None:
            heads, size = nested.integer("num_heads", heads), nested.integer("head_dim", size)
            width = nested.integer("short_conv_kernel_size", width)
        recurrent = RecurrentConfig(_recurs(config, nested), heads, size, width, key_heads=heads, key_dim=size)
        return {**found, "latent": replace(found["latent"], interleaved=False), "rope": NO_ROPE, "recurrent": recurrent}

    def gguf_names(self, config: ModelConfig) -> GgufNames:
        rates = Piece("model.layers.*.self_attn.A_log", made=lambda stored: stored.neg().log().view(1, 1, -1, 1))
        return {**super().gguf_names(config), "blk.*.ssm_a": [rates]}

    def names(self, config: ModelConfig) -> Names:
        return {**block_sparse_names(), "model.layers.*.self_attn.forget_gate.": "model.layers.*.self_attn."}


def _recurs(config: Fields, nested: Fields | None) -> tuple[bool, ...]:
    """Which layers have a state: by their kinds, by their numbers from 1 on, or all but each fourth."""
    if config.values.get("layer_types") is not None:
        return layers_of_type(config, KINDS)
    count = config.integer("num_hidden_layers")
    listed = None if nested is None else nested.token_ids("kda_layers")
    if not listed:
        return tuple(layer == 0 or layer % 4 != 0 for layer in range(count))
    if not set(listed) <= set(range(1, count + 1)):
        raise ModelError(f"{config.where}: kda_layers names layers that are not there, {listed}.")
    return tuple(layer + 1 in listed for layer in range(count))

"""Qwen2: Llama with biases on query, key and value; its upper layers may slide. Qwen3 has a norm on each query and key
head instead. Their MoEs have a mixture of experts in all layers or in some, that of Qwen2 and a shared expert, whose
result a gate of its own scales.

Qwen3-Next: gated delta nets in most layers and gated attention in the others, before experts with a shared one.
Qwen3.5 has its projections side by side, and a plain MLP or experts. Its checkpoints are multimodal: attention rotates
by time, height and width of a token.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, MoEConfig, RecurrentConfig
from bough.models.family import ModelFamily, layers_of_type, read_moe, window_fields
from bough.models.fields import Fields
from bough.models.names import GgufNames, Names, Piece, fused, fused_experts, nested, pairs_apart, pieces_of
from bough.models.vision import Sectioned


class Qwen2(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        """A window holds only where `use_sliding_window` says so."""
        if not config.boolean("use_sliding_window"):
            return {}
        first = config.count("max_window_layers")
        return window_fields(config, lambda layer: layer >= first)


class Qwen2Moe(Qwen2):
    def fields(self, config: Fields) -> dict[str, Any]:
        moe = shared_experts(config)
        return {**super().fields(config), "qkv_bias": config.boolean("qkv_bias", True), "moe": moe}

    def names(self, config: ModelConfig) -> Names:
        return shared_names()


def shared_experts(config: Fields) -> MoEConfig:
    """Experts beside one that every token passes."""
    return read_moe(
        config,
        renormalise=config.boolean("norm_topk_prob"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=sparse_steps(config),
    )


def shared_names() -> Names:
    """Where the shared expert and its gate stand."""
    theirs = "model.layers.*.mlp.shared_expert"
    return {f"{theirs}_gate": Piece(f"{theirs}_gate", plane=0), f"{theirs}.": f"{theirs}s."}


def sparse_steps(config: Fields) -> tuple[bool, ...]:
    """Which layers have no experts: those that `mlp_only_layers` lists, and all but each so-manieth."""
    listed, step = config.token_ids("mlp_only_layers"), config.integer("decoder_sparse_step")
    dense = tuple(layer in listed or (layer + 1) % step != 0 for layer in range(config.integer("num_hidden_layers")))
    return dense if any(dense) else ()


class Qwen3Moe(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        moe = read_moe(config, renormalise=config.boolean("norm_topk_prob"), dense_layers=sparse_steps(config))
        slides = config.boolean("use_sliding_window")  # then all layers do
        return {"moe": moe, **(window_fields(config, lambda _: True) if slides else {})}


ATTENTION, NET = "model.layers.*.self_attn", "model.layers.*.linear_attn"
KINDS = {"linear_attention": True, "full_attention": False}


class Qwen3Next(ModelFamily):
    partial_rotation = pairs_apart = further_apart = True
    recurrent_kind = "GatedDeltaNet"
    gguf_modules: ClassVar[Mapping[str, str]] = {"blk.*.ssm_conv1d": f"{ATTENTION}.q_conv1d"}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**net_fields(config), "moe": shared_experts(config)}

    def gguf_names(self, config: ModelConfig) -> GgufNames:
        """Attention has its queries and gates as it has them elsewhere, and a net its projections side by side."""
        query = pieces_of(attention_names(config)[f"{ATTENTION}.q_proj"])
        return {**super().gguf_names(config), "blk.*.attn_q": query, "blk.*.attn_qkv": net_projections(config)}

    def names(self, config: ModelConfig) -> Names:
        net = config.recurrent
        assert net is not None
        shared = net.heads // net.key_heads
        sizes = (net.key_dim, net.key_dim, shared * net.value_dim, shared * net.value_dim)
        return {
            **attention_names(config),
            **shared_names(),
            **net_names(net),
            f"{NET}.in_proj_qkvz": fused(projections("qkvz"), sizes, groups=net.key_heads),
            f"{NET}.in_proj_ba": fused(projections("ba"), (shared, shared), groups=net.key_heads),
        }


def net_fields(config: Fields) -> dict[str, Any]:
    """What all of Qwen's models with gated delta nets have."""
    interval = config.integer("full_attention_interval")
    net = RecurrentConfig(
        layers=layers_of_type(config, KINDS, usual=lambda layer: (layer + 1) % interval != 0),
        heads=config.integer("linear_num_value_heads"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_width=config.integer("linear_conv_kernel_dim"),
        key_heads=config.integer("linear_num_key_heads"),
        key_dim=config.integer("linear_key_head_dim"),
    )
    if net.heads % net.key_heads:
        raise ModelError(f"{config.where}: {net.heads} value heads cannot share {net.key_heads} key heads evenly.")
    return {"recurrent": net, "output_bias": config.boolean("attention_bias")}


def attention_names(config: ModelConfig) -> Names:
    """Queries with their gates, keys, and the norms of their heads, of which the first part rotates."""
    parts, dim = [f"{ATTENTION}.{part}" for part in ("q_proj", "gate_proj")], config.head_dim
    query, gate = fused(parts, (dim, dim), groups=config.num_heads)
    key, query_norm, key_norm = (Piece(f"{ATTENTION}.{part}") for part in ("k_proj", "q_norm", "k_norm"))
    norms = pairs_apart(query_norm, key_norm, replace(config, num_heads=1, num_kv_heads=1))
    query, key = pairs_apart(query, key, config)
    return {query.module: [query, gate], **{piece.module: piece for piece in (key, *norms)}}


def net_names(net: RecurrentConfig) -> Names:
    """What stands under the same names in all of them, and the convolution of queries, keys and values."""
    keys = net.key_heads * net.key_dim
    parts = [f"{ATTENTION}.{part}_conv1d" for part in "qkv"]
    return {f"{NET}.": f"{ATTENTION}.", f"{NET}.conv1d": fused(parts, (keys, keys, net.heads * net.value_dim))}


def projections(parts: str) -> list[str]:
    """Of the layer, by their letters."""
    return [f"{ATTENTION}.{part}_proj" for part in parts]


def net_projections(config: ModelConfig) -> list[Piece]:
    """Queries, keys and values, of which all heads stand behind each other."""
    net = config.recurrent
    assert net is not None
    return fused(projections("qkv"), (*[net.key_heads * net.key_dim] * 2, net.heads * net.value_dim))


class Qwen35(Sectioned, Qwen3Next):
    alternating = (11, 11, 10)
    gguf_values = ("attn_qkv", "ssm_conv1d", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt.bias")

    def gguf_names(self, config: ModelConfig) -> GgufNames:
        """Value heads stand in another order there: the first of each key, the second of each, and so on."""
        found, net = super().gguf_names(config), config.recurrent
        assert net is not None
        keys, dim = net.key_heads, net.value_dim
        order = [turn * keys + key for key in range(keys) for turn in range(net.heads // keys)]
        wide = [head * dim + at for head in order for at in range(dim)]
        for name in (f"blk.*.{part}" for part in self.gguf_values):
            *others, values = found[name]
            start = values.rows.start if isinstance(values.rows, slice) else 0
            rows = tuple(start + row for row in (wide if name.endswith(("qkv", "conv1d", "gate")) else order))
            found[name] = [*others, replace(values, rows=rows)]
        found["blk.*.ssm_out"] = [Piece(f"{ATTENTION}.out_proj", made=lambda matrix: matrix[:, wide])]
        return found

    def fields(self, config: Fields) -> dict[str, Any]:
        return net_fields(config)

    def names(self, config: ModelConfig) -> Names:
        net = config.recurrent
        assert net is not None
        return nested(
            {
                **attention_names(config),
                **net_names(net),
                f"{NET}.in_proj_qkv": net_projections(config),
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

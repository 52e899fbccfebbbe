"""Qwen2: Llama with biases on query, key and value; its upper layers may slide. Qwen3 has a norm on each query and key
head instead. Their MoEs have a mixture of experts in all layers or in some, that of Qwen2 and a shared expert, whose
result a gate of its own scales."""

from typing import Any

from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.family import ModelFamily, read_moe, window_fields
from bough.models.fields import Fields
from bough.models.names import Names, Piece


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

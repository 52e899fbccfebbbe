"""Phi 1 and 2: attention and a plain MLP side by side after one layer norm, half of each head rotates, biases
throughout, of the logits too. Phi-3 and Phi-4: Llama with fused projections, of which a part of each head may rotate,
stretched by LongRoPE. Phi-3.5 MoE: layer norms, and two experts for each token, chosen and weighed one after the other
(SparseMixer)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from bough.core.model_config import ModelConfig, MoEConfig, RopeConfig
from bough.models.family import ModelFamily, layer_norms, window_fields
from bough.models.fields import Fields
from bough.models.mistral import block_sparse_names
from bough.models.names import GGUF_FUSED_MLP, Names, fused_gate_up, fused_qkv
from bough.models.rope_config import read_rope


class Phi(ModelFamily):
    partial_rotation = pairs_apart = True
    block_kind = "ParallelBlock"
    block_options: ClassVar[Mapping[str, Any]] = {"one_norm": True}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**layer_norms(config), "mlp": "plain", "mlp_bias": True, "head_bias": True}


class Phi3(ModelFamily):
    gguf_modules = GGUF_FUSED_MLP
    partial_rotation = pairs_apart = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return window_fields(config, lambda layer: True)

    def names(self, config: ModelConfig) -> Names:
        return {"model.layers.*.self_attn.qkv_proj": fused_qkv(config), **fused_gate_up(config)}


class PhiMoe(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        moe = MoEConfig(
            experts=config.integer("num_local_experts"),
            per_token=2,
            intermediate_size=config.integer("intermediate_size"),
            scores="sparsemixer",
            jitter=config.number("router_jitter_noise"),
            renormalise=False,
        )
        return {
            "moe": moe,
            "rope": _rope(config),
            "norm": "layer",
            "norm_bias": True,
            "head_bias": config.boolean("lm_head_bias"),
            **window_fields(config, lambda layer: True),
        }

    def names(self, config: ModelConfig) -> Names:
        return {**block_sparse_names(), "model.layers.*.mlp.router": "model.layers.*.mlp.gate"}


def _rope(config: Fields) -> RopeConfig:
    """Where contexts are stretched, the file says itself how much attention is sharpened."""
    rope = read_rope(config)
    given = config.section("rope_parameters") or config.section("rope_scaling")
    if rope.kind == "default" or given is None:
        return rope
    return replace(rope, attention_factor=given.number("long_mscale"))

"""Phi-3.5 MoE: layer norms, and two experts for each token, chosen and weighed one after the other (SparseMixer)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bough.core.model_config import ModelConfig, MoEConfig, RopeConfig
from bough.models.family import ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.mixtral import block_sparse_names
from bough.models.names import Names
from bough.models.rope_config import read_rope


class PhiMoe(ModelFamily):
    architectures = ("PhimoeForCausalLM", "PhiMoEForCausalLM")
    model_types = ("phimoe",)
    gguf_architecture = "phimoe"

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
        return block_sparse_names()


def _rope(config: Fields) -> RopeConfig:
    """Where contexts are stretched, the file says itself how much attention is sharpened."""
    rope = read_rope(config)
    given = config.section("rope_parameters") or config.section("rope_scaling")
    if rope.kind == "default" or given is None:
        return rope
    return replace(rope, attention_factor=given.number("long_mscale"))

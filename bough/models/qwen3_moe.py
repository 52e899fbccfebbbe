"""Qwen3 MoE: Qwen3 with a mixture of experts instead of the MLP, in all layers or in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bough.models.family import Metadata, read_moe
from bough.models.fields import Fields
from bough.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    architectures = ("Qwen3MoeForCausalLM",)
    model_types = ("qwen3_moe",)
    gguf_architecture = "qwen3moe"
    renamed_fields: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}  # what Transformers 5 writes

    def fields(self, config: Fields) -> dict[str, Any]:
        moe = read_moe(config, renormalise=config.boolean("norm_topk_prob"), dense_layers=sparse_steps(config))
        return {**super().fields(config), "moe": moe}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"norm_topk_prob": True}  # which no key says


def sparse_steps(config: Fields) -> tuple[bool, ...]:
    """Which layers have no experts: those that `mlp_only_layers` lists, and all but each so-manieth."""
    listed, step = config.token_ids("mlp_only_layers"), config.integer("decoder_sparse_step")
    dense = tuple(layer in listed or (layer + 1) % step != 0 for layer in range(config.integer("num_hidden_layers")))
    return dense if any(dense) else ()

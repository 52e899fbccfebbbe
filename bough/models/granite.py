"""Granite: Llama with multipliers of embeddings, attention, what each layer adds, and logits. Granite MoE has a mixture
of experts instead of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.family import Metadata, ModelFamily, read_moe
from bough.models.fields import Fields
from bough.models.names import Names, planes


class Granite(ModelFamily):
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        # Hidden states are kept divided by what multiplies all additions to them. Norms undo that, to the epsilon.
        added = config.number("residual_multiplier", 1.0)
        return {
            "embedding_scale": config.number("embedding_multiplier", 1.0) / added,
            "norm_eps": config.number("rms_norm_eps", 1e-6) / added**2,
            "query_scale": config.number("attention_multiplier", 1.0),
            "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
            "mlp_bias": config.boolean("mlp_bias"),
        }


class GraniteMoe(Granite):
    def fields(self, config: Fields) -> dict[str, Any]:
        moe = read_moe(config, experts="num_local_experts", size="intermediate_size")
        return {**super().fields(config), "moe": moe}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        if "shared_expert_intermediate_size" in given:
            raise ModelError("Granite MoE with shared experts is not supported; models without them are.")
        return {}

    def names(self, config: ModelConfig) -> Names:
        assert config.moe is not None
        return expert_names(config.moe)


def expert_names(moe: MoEConfig) -> Names:
    """Where the router and the experts stand."""
    theirs, experts, inner = "model.layers.*.block_sparse_moe", moe.experts, moe.intermediate_size
    gates, ups = slice(0, inner), slice(inner, 2 * inner)
    return {
        f"{theirs}.router.layer": "model.layers.*.mlp.gate",
        f"{theirs}.input_linear": planes("gate_proj", experts, gates) + planes("up_proj", experts, ups),
        f"{theirs}.output_linear": planes("down_proj", experts),
    }

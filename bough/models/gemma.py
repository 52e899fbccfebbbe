"""Gemma and Gemma 2: scaled embeddings, norms that store their weight minus one. Gemma 2 has norms after attention and
MLP as well, caps on scores and logits, and a window in every other layer. VaultGemma is Gemma 2 without those norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.core.model_config import Activation
from bough.models.family import GATED, Metadata, ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.names import GGUF_SANDWICH

ACTIVATIONS: dict[str, Activation] = {**GATED, "gelu": "gelu_tanh"}  # first checkpoints name the one, mean the other

GGUF_27B_LAYERS = 46


def gguf_query_scale(given: Mapping[str, Any], layers_of_27b: int) -> int:
    """The `query_pre_attn_scalar` of a GGUF file, which does not say it: only the models of 27B scale queries by hidden
    size per head."""
    per_head: int = given["hidden_size"] // given["num_attention_heads"]
    dim: int = given["head_dim"]
    return per_head if given["num_hidden_layers"] == layers_of_27b else dim


class Gemma(ModelFamily):
    activations = ACTIVATIONS

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"embedding_scale": config.integer("hidden_size") ** 0.5, "norm_plus_one": True}


class Gemma2(Gemma):
    gguf_modules = GGUF_SANDWICH
    block_kind = "SandwichBlock"
    activation_field = "hidden_activation"

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            **super().fields(config),
            "query_scale": config.number("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": config.optional_number("attn_logit_softcapping"),
            "logit_softcap": config.optional_number("final_logit_softcapping"),
            **window_fields(config, lambda layer: layer % 2 == 0),
        }

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"query_pre_attn_scalar": gguf_query_scale(given, GGUF_27B_LAYERS)}


class VaultGemma(Gemma2):
    block_kind = "PreNormBlock"

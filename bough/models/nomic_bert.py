"""Nomic BERT: BERT with rotation in the place of learned positions, and a gated MLP; both without biases."""

from __future__ import annotations

from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.bert import ENCODER, Bert
from bough.models.family import GATED, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, fused


class NomicBert(Bert):
    activations = GATED
    prefix = "nomic_bert."

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**ENCODER, **layer_norms(config), "token_types": config.integer("type_vocab_size")}

    def modules(self, config: ModelConfig) -> Names:
        qkv = [f"model.layers.*.self_attn.{part}_proj" for part in "qkv"]
        return {
            **self.stated_names,
            "encoder.layers.*.attn.Wqkv": fused(qkv, (config.num_heads * config.head_dim,) * 3),
        }

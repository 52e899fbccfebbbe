"""Nomic BERT: BERT with rotation in the place of learned positions, and a gated MLP; both without biases."""

from __future__ import annotations

from typing import Any, ClassVar

from bough import layers
from bough.core.model_config import ModelConfig
from bough.models.encoder_family import EncoderFamily
from bough.models.family import GATED, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names


class NomicBert(EncoderFamily):
    architectures = ("NomicBertModel",)
    model_types = ("nomic_bert",)
    prefix = "nomic_bert"
    activations = GATED
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 2048,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "rope_theta": 1000.0,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), **layer_norms(config), "token_types": config.integer("type_vocab_size")}

    def modules(self, config: ModelConfig) -> Names:
        return {
            "embeddings.word_embeddings": "model.embed_tokens",
            "embeddings.token_type_embeddings": "model.embed_types",
            "embeddings.LayerNorm": "model.embed_norm",
            "layers.": "model.layers.",
        }

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.PostNormBlock(config, layer, placement)

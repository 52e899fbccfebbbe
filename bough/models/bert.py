"""BERT, which MiniLM, BGE and E5 are too: learned positions, norms behind attention and MLP, token types for pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from bough import layers
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.encoder_family import BERT_LAYER, EncoderFamily
from bough.models.family import layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, Piece


class Bert(EncoderFamily):
    architectures: tuple[str, ...] = ("BertModel", "BertForSequenceClassification", "BertForMaskedLM")
    model_types: tuple[str, ...] = ("bert",)
    prefix = "bert"
    first_position = 0  # of the table
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "attention_bias": True,
        "classifier_hidden": "tanh",
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            **super().fields(config),
            **layer_norms(config),
            "rope": NO_ROPE,
            "learned_positions": True,
            "context_length": config.integer("max_position_embeddings") - self.first_position,
            "token_types": config.integer("type_vocab_size"),
            "mlp": "plain",
            "mlp_bias": True,
        }

    def modules(self, config: ModelConfig) -> Names:
        rows = slice(self.first_position, self.first_position + config.context_length)
        return {
            "embeddings.word_embeddings": "model.embed_tokens",
            "embeddings.position_embeddings": Piece("model.embed_positions", rows),
            "embeddings.token_type_embeddings": "model.embed_types",
            "embeddings.LayerNorm": "model.embed_norm",
            **{f"encoder.layer.*.{theirs}": f"model.layers.*.{ours}" for theirs, ours in BERT_LAYER.items()},
        }

    def head(self) -> Names:
        return {"bert.pooler.dense": "score.hidden", "classifier": "score.out"}

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.PostNormBlock(config, layer, placement)

"""BERT, which MiniLM, BGE and E5 are too: attention to both sides, learned positions, norms behind attention and MLP,
token types for pairs. RoBERTa and XLM-R (multilingual E5, BGE-M3 and its rerankers) have positions from the third row
of their table on, and a head of their own."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, Piece

ENCODER: dict[str, Any] = {"causal": False, "norm": "layer", "embedding_norm": True, "final_norm": False}


class Bert(ModelFamily):
    activations = PLAIN
    block_kind = "PostNormBlock"
    prefix = "bert."  # that the names of the model's own modules may have
    first_position = 0  # of their table
    head: ClassVar[Names] = {"bert.pooler.dense": "score.hidden", "classifier": "score.out"}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            **ENCODER,
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
        return {**self.stated_names, "embeddings.position_embeddings": Piece("model.embed_positions", rows)}

    def names(self, config: ModelConfig) -> Names:
        own = self.modules(config)
        return {**own, **{self.prefix + name: piece for name, piece in own.items()}, **self.head}


class Roberta(Bert):
    prefix = "roberta."
    first_position = 2  # behind that of padding, whose token id is 1
    head: ClassVar[Names] = {"classifier.dense": "score.hidden", "classifier.out_proj": "score.out"}

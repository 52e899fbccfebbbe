"""BERT, which MiniLM, BGE and E5 are too: attention to both sides, learned positions, norms behind attention and MLP,
token types for pairs. RoBERTa and XLM-R (multilingual E5, BGE-M3 and its rerankers) have positions from the third row
of their table on, and a head of their own. ModernBERT has norms before attention and MLP but for the first, rotation,
windows in two of three layers, no biases. Nomic BERT has rotation, and a gated MLP; both without biases."""

from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import LAYER_TYPES, PLAIN, ModelFamily, layer_norms, layers_of_type
from bough.models.fields import Fields
from bough.models.names import Names, Piece, fused, fused_qkv
from bough.models.rope_config import read_local_rope

ENCODER: dict[str, Any] = {"causal": False, "norm": "layer", "embedding_norm": True, "final_norm": False}


class Bert(ModelFamily):
    block_kind = "PostNormBlock"
    prefix = "bert."  # that the names of the model's own modules may have
    first_position = 0  # of their table
    head: ClassVar[Names] = {"bert.pooler.dense": "score.hidden", "classifier": "score.out"}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            **ENCODER,
            **layer_norms(config),
            "rope": NO_ROPE,
            "context_length": config.integer("max_position_embeddings") - self.first_position,
            "token_types": config.integer("type_vocab_size"),
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

    def fields(self, config: Fields) -> dict[str, Any]:
        if (padding := config.values.get("pad_token_id")) not in (None, 1):
            raise ModelError(f"{config.where}: pad_token_id is {padding!r}; positions are read for 1 alone.")
        return super().fields(config)


class ModernBert(Bert):
    activations = PLAIN
    activation_field = "hidden_activation"
    block_kind = "PreNormBlock"
    prefix = "model."
    head: ClassVar[Names] = {"head.dense": "score.hidden", "head.norm": "score.norm", "classifier": "score.out"}

    def fields(self, config: Fields) -> dict[str, Any]:
        every = config.integer("global_attn_every_n_layers")
        return {
            **ENCODER,
            "norm_eps": config.number("norm_eps", 1e-5),
            "norm_bias": config.boolean("norm_bias"),
            "final_norm": True,
            "local_rope": read_local_rope(config),
            "sliding_window": config.integer("local_attention") // 2 + 1,  # of each side, the token itself included
            "sliding_layers": layers_of_type(config, LAYER_TYPES, usual=lambda layer: layer % every != 0),
        }

    def modules(self, config: ModelConfig) -> Names:
        gated = [f"model.layers.*.mlp.{part}_proj" for part in ("gate", "up")]
        return {
            **self.stated_names,
            "layers.*.attn.Wqkv": fused_qkv(config),
            "layers.*.mlp.Wi": fused(gated, (config.intermediate_size,) * 2),
        }


class NomicBert(Bert):
    prefix = "nomic_bert."

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**ENCODER, **layer_norms(config), "token_types": config.integer("type_vocab_size")}

    def modules(self, config: ModelConfig) -> Names:
        return {**self.stated_names, "encoder.layers.*.attn.Wqkv": fused_qkv(config)}

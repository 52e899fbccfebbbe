"""Nomic BERT: BERT with rotation in the place of learned positions, and a gated MLP; both without biases."""

from __future__ import annotations

from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.bert import ENCODER, Bert
from bough.models.family import GATED, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, fused

LAYER = {
    "attn.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_layernorm",
    "mlp.fc11": "mlp.up_proj",
    "mlp.fc12": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj",
    "norm2": "post_mlp_layernorm",
}


class NomicBert(Bert):
    activations = GATED
    prefix = "nomic_bert."

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**ENCODER, **layer_norms(config), "token_types": config.integer("type_vocab_size")}

    def modules(self, config: ModelConfig) -> Names:
        qkv = [f"model.layers.*.self_attn.{part}_proj" for part in "qkv"]
        return {
            "embeddings.word_embeddings": "model.embed_tokens",
            "embeddings.token_type_embeddings": "model.embed_types",
            "emb_ln": "model.embed_norm",
            "encoder.layers.*.attn.Wqkv": fused(qkv, (config.num_heads * config.head_dim,) * 3),
            **{f"encoder.layers.*.{theirs}": f"model.layers.*.{ours}" for theirs, ours in LAYER.items()},
        }

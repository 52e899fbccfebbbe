"""Nomic BERT: BERT with rotation in the place of learned positions, and a gated MLP; both without biases."""

from __future__ import annotations

from typing import Any, ClassVar

from bough import layers
from bough.core.model_config import ModelConfig
from bough.models.encoder_family import EncoderFamily
from bough.models.family import GATED, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, fused


class NomicBert(EncoderFamily):
    architectures = ("NomicBertModel",)
    model_types = ("nomic_bert",)
    prefix = "nomic_bert"
    activations = GATED
    renamed_fields: ClassVar = {  # the first checkpoints have GPT-2's names
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "max_trained_positions": "max_position_embeddings",  # beyond which the rotation would have to be stretched
        "rotary_emb_base": "rope_theta",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 2048,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "rope_theta": 1000.0,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), **layer_norms(config), "token_types": config.integer("type_vocab_size")}

    def modules(self, config: ModelConfig) -> Names:
        ours, size = "model.layers.*", config.num_heads * config.head_dim
        return {
            "embeddings.word_embeddings": "model.embed_tokens",
            "embeddings.token_type_embeddings": "model.embed_types",
            "emb_ln": "model.embed_norm",
            "encoder.layers.*.attn.Wqkv": fused([f"{ours}.self_attn.{part}_proj" for part in "qkv"], (size,) * 3),
            "encoder.layers.*.attn.out_proj": f"{ours}.self_attn.o_proj",
            "encoder.layers.*.norm1": f"{ours}.post_attention_layernorm",
            "encoder.layers.*.mlp.fc11": f"{ours}.mlp.up_proj",
            "encoder.layers.*.mlp.fc12": f"{ours}.mlp.gate_proj",
            "encoder.layers.*.mlp.fc2": f"{ours}.mlp.down_proj",
            "encoder.layers.*.norm2": f"{ours}.post_mlp_layernorm",
        }

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.PostNormBlock(config, layer, placement)

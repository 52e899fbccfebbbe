"""ModernBERT: norms before attention and MLP but for the first, rotation, windows in two of three layers, no biases."""

from __future__ import annotations

from typing import Any, ClassVar

from bough import layers
from bough.core.model_config import ModelConfig
from bough.models.encoder_family import EncoderFamily
from bough.models.family import LAYER_TYPES, layers_of_type
from bough.models.fields import Fields
from bough.models.names import Names, fused
from bough.models.rope_config import read_local_rope


class ModernBert(EncoderFamily):
    architectures = ("ModernBertModel", "ModernBertForSequenceClassification", "ModernBertForMaskedLM")
    model_types = ("modernbert",)
    prefix = "model"
    activation_field = "hidden_activation"
    renamed_fields: ClassVar = {"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"}
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "classifier_hidden": "gelu",
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        count, every = config.integer("num_hidden_layers"), config.integer("global_attn_every_n_layers")
        sliding = tuple(layer % every != 0 for layer in range(count))
        if config.values.get("layer_types") is not None:
            sliding = layers_of_type(config, LAYER_TYPES)
        return {
            **super().fields(config),
            "norm_eps": config.number("norm_eps"),
            "norm_bias": config.boolean("norm_bias"),
            "final_norm": True,
            "local_rope": read_local_rope(config),
            "sliding_window": config.integer("local_attention") // 2 + 1,  # of each side, the token itself included
            "sliding_layers": sliding,
            "mlp_bias": config.boolean("mlp_bias"),
        }

    def modules(self, config: ModelConfig) -> Names:
        ours = "model.layers.*"
        return {
            "embeddings.tok_embeddings": "model.embed_tokens",
            "embeddings.norm": "model.embed_norm",
            "final_norm": "model.norm",
            "layers.*.attn_norm": f"{ours}.input_layernorm",
            "layers.*.attn.Wqkv": fused([f"{ours}.self_attn.{part}_proj" for part in "qkv"], (config.hidden_size,) * 3),
            "layers.*.attn.Wo": f"{ours}.self_attn.o_proj",
            "layers.*.mlp_norm": f"{ours}.post_attention_layernorm",
            "layers.*.mlp.Wi": fused(
                [f"{ours}.mlp.{part}_proj" for part in ("gate", "up")], (config.intermediate_size,) * 2
            ),
            "layers.*.mlp.Wo": f"{ours}.mlp.down_proj",
        }

    def head(self) -> Names:
        return {"head.dense": "score.hidden", "head.norm": "score.norm", "classifier": "score.out"}

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.PreNormBlock(config, layer, placement, normed=layer == 0)

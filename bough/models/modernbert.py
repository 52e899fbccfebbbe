"""ModernBERT: norms before attention and MLP but for the first, rotation, windows in two of three layers, no biases."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.bert import ENCODER, Bert
from bough.models.family import LAYER_TYPES, layers_of_type
from bough.models.fields import Fields
from bough.models.names import Names, fused
from bough.models.rope_config import read_local_rope


class ModernBert(Bert):
    activation_field = "hidden_activation"
    block_kind = "PreNormBlock"
    prefix = "model."
    head: ClassVar[Names] = {"head.dense": "score.hidden", "head.norm": "score.norm", "classifier": "score.out"}

    def fields(self, config: Fields) -> dict[str, Any]:
        count, every = config.integer("num_hidden_layers"), config.integer("global_attn_every_n_layers")
        sliding = tuple(layer % every != 0 for layer in range(count))
        if config.values.get("layer_types") is not None:
            sliding = layers_of_type(config, LAYER_TYPES)
        return {
            **ENCODER,
            "norm_eps": config.number("norm_eps", 1e-5),
            "norm_bias": config.boolean("norm_bias"),
            "final_norm": True,
            "local_rope": read_local_rope(config),
            "sliding_window": config.integer("local_attention") // 2 + 1,  # of each side, the token itself included
            "sliding_layers": sliding,
            "mlp_bias": config.boolean("mlp_bias"),
        }

    def modules(self, config: ModelConfig) -> Names:
        qkv = [f"model.layers.*.self_attn.{part}_proj" for part in "qkv"]
        gated = [f"model.layers.*.mlp.{part}_proj" for part in ("gate", "up")]
        return {
            **self.stated_names,
            "layers.*.attn.Wqkv": fused(qkv, (config.hidden_size,) * 3),
            "layers.*.mlp.Wi": fused(gated, (config.intermediate_size,) * 2),
        }

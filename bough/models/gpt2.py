"""GPT-2: learned positions instead of rotation, layer norms, a plain MLP, matrices stored [inputs, outputs]."""

from __future__ import annotations

from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, Piece, fused


class Gpt2(ModelFamily):
    activation_field = "activation_function"
    activations = PLAIN

    def read_config(self, config: Fields) -> ModelConfig:
        inner = config.optional_integer("n_inner") or 4 * config.integer("n_embd")
        return super().read_config(Fields(config.where, {**config.values, "n_inner": inner}))

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("scale_attn_by_inverse_layer_idx"):
            raise ModelError(f"{config.where}: scale_attn_by_inverse_layer_idx is not supported.")
        return {
            "rope": NO_ROPE,
            "learned_positions": True,
            **layer_norms(config, "layer_norm_epsilon"),
            "mlp": "plain",
            "mlp_bias": True,
            "query_scale": None if config.boolean("scale_attn_weights", True) else 1.0,
        }

    def names(self, config: ModelConfig) -> Names:
        ours = "model.layers.*"
        qkv = fused([f"{ours}.self_attn.{part}_proj" for part in "qkv"], (config.hidden_size,) * 3, transposed=True)
        names: Names = {
            **self.stated_names,
            "h.*.attn.c_attn": qkv,
            "h.*.attn.c_proj": Piece(f"{ours}.self_attn.o_proj", transposed=True),
            "h.*.mlp.c_fc": Piece(f"{ours}.mlp.up_proj", transposed=True),
            "h.*.mlp.c_proj": Piece(f"{ours}.mlp.down_proj", transposed=True),
        }
        return {**names, **{f"transformer.{name}": piece for name, piece in names.items()}}

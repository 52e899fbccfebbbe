"""Phi 1 and 2: attention and a plain MLP side by side after one layer norm, half of each head rotates, biases
throughout, of the logits too."""

from __future__ import annotations

from typing import Any

from bough import layers
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, projections_apart


class Phi(ModelFamily):
    architectures = ("PhiForCausalLM",)
    model_types = ("phi",)
    gguf_architecture = "phi2"
    activations = PLAIN
    partial_rotation = pairs_apart = True

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("qk_layernorm"):
            raise ModelError(f"{config.where}: qk_layernorm is not supported; no published Phi has it.")
        return {**layer_norms(config), "mlp": "plain", "mlp_bias": True, "head_bias": True}

    def names(self, config: ModelConfig) -> Names:
        layer = "model.layers.*"
        return {
            **projections_apart(config),
            "model.final_layernorm": "model.norm",
            f"{layer}.self_attn.dense": f"{layer}.self_attn.o_proj",
            f"{layer}.mlp.fc1": f"{layer}.mlp.up_proj",
            f"{layer}.mlp.fc2": f"{layer}.mlp.down_proj",
        }

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        return layers.ParallelBlock(config, layer, placement, one_norm=True)

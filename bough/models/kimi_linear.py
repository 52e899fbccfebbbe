"""Kimi Linear: Kimi's delta attention in most layers, latent attention without positions in the others; the experts of
DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig, RecurrentConfig
from bough.models.deepseek_v3 import DeepseekV3
from bough.models.family import layers_of_type
from bough.models.fields import Fields
from bough.models.mistral import block_sparse_names
from bough.models.names import Names
from bough.models.qwen3_next import KINDS

MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


class KimiLinear(DeepseekV3):
    recurrent_kind = "KimiDelta"

    def fields(self, config: Fields) -> dict[str, Any]:
        found, nested = super().fields(config), config.section("linear_attn_config")
        if config.values.get("mlp_layer_types") is not None:
            dense = layers_of_type(config, {"dense": True, "sparse": False}, "mlp_layer_types")
            found["moe"] = replace(found["moe"], dense_layers=dense if any(dense) else ())
        heads, size = config.integer("linear_num_heads"), config.integer("linear_head_dim")
        width = config.integer("linear_conv_kernel_dim")
        if nested is not None:
            heads, size = nested.integer("num_heads", heads), nested.integer("head_dim", size)
            width = nested.integer("short_conv_kernel_size", width)
        recurrent = RecurrentConfig(_recurs(config, nested), heads, size, width, key_heads=heads, key_dim=size)
        return {**found, "latent": replace(found["latent"], interleaved=False), "rope": NO_ROPE, "recurrent": recurrent}

    def names(self, config: ModelConfig) -> Names:
        theirs, ours = "model.layers.*.block_sparse_moe", "model.layers.*.mlp"
        bias = "gate.e_score_correction_bias"
        return {
            **block_sparse_names(),
            f"{theirs}.{bias}": f"{ours}.{bias}",
            **{f"{theirs}.{part}": f"{ours}.{part}" for part in MLP_PARTS},
            **{f"{theirs}.shared_experts.{part}": f"{ours}.shared_experts.{part}" for part in MLP_PARTS},
        }


def _recurs(config: Fields, nested: Fields | None) -> tuple[bool, ...]:
    """Which layers have a state: by their kinds, by their numbers from 1 on, or all but each fourth."""
    if config.values.get("layer_types") is not None:
        return layers_of_type(config, KINDS)
    count = config.integer("num_hidden_layers")
    listed = None if nested is None else nested.token_ids("kda_layers")
    if not listed:
        return tuple(layer == 0 or layer % 4 != 0 for layer in range(count))
    if not set(listed) <= set(range(1, count + 1)):
        raise ModelError(f"{config.where}: kda_layers names layers that are not there, {listed}.")
    return tuple(layer + 1 in listed for layer in range(count))

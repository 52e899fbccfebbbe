"""LFM2: gated short convolutions in most layers, attention with normed heads in the others; with experts or without."""

from typing import Any

from bough.core.model_config import ModelConfig, RecurrentConfig
from bough.models.family import ModelFamily, layers_of_type, read_moe
from bough.models.fields import Fields
from bough.models.names import Names, fused

KINDS = {"conv": True, "linear_attention": True, "full_attention": False}


class Lfm2(ModelFamily):
    recurrent_kind = "ShortConv"

    def fields(self, config: Fields) -> dict[str, Any]:
        attends = config.values.get("full_attn_idxs")
        convolution = RecurrentConfig(
            layers=layers_of_type(config, KINDS, usual=lambda layer: attends is not None and layer not in attends),
            heads=config.integer("hidden_size"),
            value_dim=1,
            conv_width=config.integer("conv_L_cache"),
            conv_bias=config.boolean("conv_bias"),
            bias=config.boolean("conv_bias"),
        )
        return {"recurrent": convolution, "intermediate_size": _inner_width(config)}

    def names(self, config: ModelConfig) -> Names:
        parts = [f"model.layers.*.self_attn.{part}_proj" for part in "bcx"]
        return {**self.stated_names, "model.layers.*.conv.in_proj": fused(parts, (config.hidden_size,) * 3)}


class Lfm2Moe(Lfm2):
    def fields(self, config: Fields) -> dict[str, Any]:
        dense, count = config.count("num_dense_layers"), config.integer("num_hidden_layers")
        moe = read_moe(
            config,
            scores="sigmoid",
            renormalise=config.boolean("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
            correction_bias=config.boolean("use_expert_bias", True),
            dense_layers=tuple(layer < dense for layer in range(count)) if dense else (),
        )
        return {**super().fields(config), "moe": moe}


def _inner_width(config: Fields) -> int:
    """Of the MLPs, which is not the one that the configuration states unless it says so."""
    stated = config.integer("intermediate_size")
    if not config.boolean("block_auto_adjust_ff_dim", True):
        return stated
    step, wanted = config.integer("block_multiple_of"), int(2 * stated / 3)
    wanted = int(config.number("block_ffn_dim_multiplier") * wanted)
    return -(-wanted // step) * step

"""ERNIE 4.5 and Helium: Llama whose heads rotate neighbours. ERNIE 4.5 MoE has shared and routed experts in a range of
its layers."""

from typing import Any

from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, Piece


class Ernie45(ModelFamily):
    pairs_apart = neighbours = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("use_bias")}


class Helium(Ernie45):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"output_bias": False}


class Ernie45Moe(Ernie45):
    def fields(self, config: Fields) -> dict[str, Any]:
        inner = config.integer("moe_intermediate_size")
        moe = MoEConfig(
            experts=config.integer("moe_num_experts"),
            per_token=config.integer("moe_k"),
            intermediate_size=inner,
            correction_bias=True,
            shared_size=inner * config.count("moe_num_shared_experts"),
            dense_layers=_dense_layers(config),
        )
        return {**super().fields(config), "moe": moe}

    def names(self, config: ModelConfig) -> Names:
        mlp, bias = "model.layers.*.mlp", "e_score_correction_bias"
        return {**super().names(config), f"{mlp}.moe_statics.{bias}": Piece(f"{mlp}.gate.{bias}", plane=0)}


def _dense_layers(config: Fields) -> tuple[bool, ...]:
    layers, first = config.integer("num_hidden_layers"), config.count("moe_layer_start_index")
    end = config.values.get("moe_layer_end_index", -1)  # the last layer with experts; -1: of all
    last = layers - 1 if end == -1 else config.count("moe_layer_end_index")
    step = config.integer("moe_layer_interval")
    return tuple((layer + 1) % step != 0 or not first <= layer <= last for layer in range(layers))

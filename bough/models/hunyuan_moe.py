"""Hunyuan MoE: Hunyuan with a mixture of experts and one that every token passes."""

from __future__ import annotations

from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.fields import Fields
from bough.models.hunyuan import HunYuanDense
from bough.models.names import Names


class HunYuanMoe(HunYuanDense):
    architectures = ("HunYuanMoEV1ForCausalLM",)
    model_types = ("hunyuan_v1_moe",)
    gguf_architecture = "hunyuan-moe"

    def fields(self, config: Fields) -> dict[str, Any]:
        inner = config.integer("intermediate_size")
        moe = MoEConfig(
            experts=_of_all_layers(config, "num_experts"),
            per_token=_of_all_layers(config, "moe_topk"),
            intermediate_size=inner,
            shared_size=inner,
        )
        return {**super().fields(config), "moe": moe}

    def names(self, config: ModelConfig) -> Names:
        mlp = "model.layers.*.mlp"
        shared = {
            f"{mlp}.shared_mlp.{part}_proj": f"{mlp}.shared_experts.{part}_proj" for part in ("gate", "up", "down")
        }
        return {**super().names(config), f"{mlp}.gate.wg": f"{mlp}.gate", **shared}


def _of_all_layers(config: Fields, name: str) -> int:
    """A number that may be given for each layer, where they are all the same."""
    given = config.token_ids(name) or (1,)
    if len(set(given)) != 1:
        raise ModelError(f"{config.where}: {name} differs between layers, which is not supported.")
    return given[0]

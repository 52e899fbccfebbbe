"""Hunyuan: Llama with a norm on each query and key head, after their rotation. Hunyuan MoE has a mixture of experts and
one that every token passes; Hunyuan 3 has experts that are chosen as GLM-4.5's."""

from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import MoEConfig
from bough.models.deepseek_v2 import corrected_experts
from bough.models.family import ModelFamily
from bough.models.fields import Fields


class HunYuanDense(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qk_norm": True, "qk_norm_last": True}


class HunYuanMoe(HunYuanDense):
    def fields(self, config: Fields) -> dict[str, Any]:
        inner = config.integer("intermediate_size")
        moe = MoEConfig(
            experts=_of_all_layers(config, "num_experts"),
            per_token=_of_all_layers(config, "moe_topk"),
            intermediate_size=inner,
            shared_size=inner,
        )
        return {**super().fields(config), "moe": moe}


def _of_all_layers(config: Fields, name: str) -> int:
    """A number that may be given for each layer, where they are all the same."""
    given = config.token_ids(name) or (1,)
    if len(set(given)) != 1:
        raise ModelError(f"{config.where}: {name} differs between layers, which is not supported.")
    return given[0]


class HunYuan3(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"moe": corrected_experts(config), "qk_norm": True}

"""StarCoder 2: layer norms, a plain MLP, biases throughout; where there is a window, it holds for all layers."""

from __future__ import annotations

from typing import Any

from bough.models.family import PLAIN, ModelFamily, layer_norms, window_fields
from bough.models.fields import Fields


class Starcoder2(ModelFamily):
    activations = PLAIN

    def fields(self, config: Fields) -> dict[str, Any]:
        mlp = {"mlp": "plain", "mlp_bias": config.boolean("use_bias")}
        return {**layer_norms(config, "norm_epsilon"), **mlp, **window_fields(config, lambda layer: True)}

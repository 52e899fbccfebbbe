"""Nemotron: layer norms that store their weight minus one, a plain MLP of squared ReLUs, half of each head rotates."""

from __future__ import annotations

from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, projections_apart


class Nemotron(ModelFamily):
    activations = PLAIN
    partial_rotation = pairs_apart = True

    def fields(self, config: Fields) -> dict[str, Any]:
        mlp = {"mlp": "plain", "mlp_bias": config.boolean("mlp_bias")}
        return {**layer_norms(config, "norm_eps"), "norm_plus_one": True, **mlp}

    def names(self, config: ModelConfig) -> Names:
        return projections_apart(config)

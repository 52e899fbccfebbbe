"""Scores of labels: what classifiers and reward models have in the place of logits."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bough.core.model_config import ModelConfig
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class LabelHead:
    """A matrix over the pooled hidden states, behind a layer with an activation where the model has one. Small, so
    torch computes it, in float32."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        assert config.vectors is not None
        self._config, self._eps, width = config.vectors, config.norm_eps, config.hidden_size
        shapes = {"out.weight": (len(self._config.labels), width), "out.bias": (len(self._config.labels),)}
        shapes |= {"hidden.weight": (width, width), "hidden.bias": (width,), "norm.weight": (width,)}
        self._weights = {name: placement.empty(*shapes[name]) for name in self._config.head}

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[n, labels] of [n, hidden_size]"""
        weights = {name: weight.float() for name, weight in self._weights.items()}
        if "hidden.weight" in weights:
            pooled = F.linear(pooled, weights["hidden.weight"], weights.get("hidden.bias"))
            pooled = F.gelu(pooled) if "norm.weight" in weights else torch.tanh(pooled)
        if "norm.weight" in weights:
            pooled = F.layer_norm(pooled, pooled.shape[-1:], weights["norm.weight"], None, self._eps)
        return F.linear(pooled, weights["out.weight"], weights.get("out.bias"))

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for name, weight in self._weights.items():
            yield WeightSlot(f"{prefix}{name}", weight)

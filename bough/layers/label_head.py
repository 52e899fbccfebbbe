"""Scores of labels: what classifiers and reward models have in the place of logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bough.core.model_config import ModelConfig
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class LabelHead:
    """A matrix over the pooled hidden states, behind a layer with an activation where the model has one. Small, so it
    is computed by torch, in float32, and every rank holds all of it."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        assert config.vectors is not None
        self._config, self._eps, width = config.vectors, config.norm_eps, config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"out.weight": (len(config.vectors.labels), width)}
        if config.vectors.label_bias:
            shapes["out.bias"] = shapes["out.weight"][:1]
        if config.vectors.hidden:
            shapes["hidden.weight"] = (width, width)
            shapes |= {"hidden.bias": (width,)} if config.vectors.hidden_bias else {}
            shapes |= {"norm.weight": (width,)} if config.vectors.hidden_norm else {}
        self._weights = {name: placement.empty(*shape) for name, shape in shapes.items()}

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[n, labels] of [n, hidden_size]"""
        weights = {name: weight.float() for name, weight in self._weights.items()}
        if self._config.hidden:
            pooled = F.linear(pooled, weights["hidden.weight"], weights.get("hidden.bias"))
            pooled = torch.tanh(pooled) if self._config.hidden == "tanh" else F.gelu(pooled)
        if self._config.hidden_norm:
            pooled = F.layer_norm(pooled, pooled.shape[-1:], weights["norm.weight"], None, self._eps)
        return F.linear(pooled, weights["out.weight"], weights.get("out.bias"))

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for name, weight in self._weights.items():
            yield WeightSlot(f"{prefix}{name}", weight)


def make_label_head(config: ModelConfig, placement: Placement) -> LabelHead | None:
    return LabelHead(config, placement) if config.vectors is not None and config.vectors.labels else None

"""A model whose ranks are attention groups: every forward pass is one of all groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.distributed.group import RankGroup
from bough.layers.weights import WeightSlot
from bough.models.base import CausalLM


class InStep(CausalLM):
    """Says how many tokens there are before they are exchanged. All go through the last layer, because the other groups
    count on as many there."""

    def __init__(self, model: CausalLM, group: RankGroup) -> None:
        self._model, self._group = model, group

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        self._group.begin_step(len(token_ids))
        hidden = self._model.forward(token_ids, positions, replace(ctx, logits_indices=None))
        return hidden if ctx.logits_indices is None else hidden.index_select(0, ctx.logits_indices)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def slots(self) -> Iterator[WeightSlot]:
        return self._model.slots()

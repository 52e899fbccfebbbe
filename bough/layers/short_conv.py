"""A gated short convolution as a layer: its state is the last few tokens alone."""

from __future__ import annotations

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.placement import Placement
from bough.layers.recurrent import RecurrentLayer


class ShortConv(RecurrentLayer):
    """One gate before the convolution and one behind it."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        shape, size = config.recurrent, config.hidden_size
        assert shape is not None and shape.channels == size
        super().__init__(config, layer, placement, {"x_proj": size}, {"b_proj": size, "c_proj": size}, bias=shape.bias)

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        x, before, behind = parts
        return behind * self._convolve(before * x, ctx, silu=False)

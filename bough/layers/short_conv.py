"""A gated short convolution as a layer: its state is the last few tokens alone."""

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.linear import Columns
from bough.layers.placement import Placement
from bough.layers.recurrent import RecurrentLayer, Shares


class ShortConv(RecurrentLayer):
    """One gate before the convolution and one behind it."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        own = Shares(config, placement.topology)
        x, *gates = (Columns(f"{part}_proj", own.values) for part in "xbc")
        super().__init__(config, layer, placement, own, (x,), gates, bias=own.shape.bias)

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        x, before, behind = parts
        return behind * self._convolve(before * x, ctx, silu=False)

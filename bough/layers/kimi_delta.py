"""Kimi's delta attention as a layer: a gated delta net in which every channel of a key decays at a rate of its own."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.linear import ColumnLinear, Columns
from bough.layers.norm import RmsNorm
from bough.layers.placement import Placement
from bough.layers.recurrent import RecurrentLayer, Shares, rate_slot
from bough.layers.weights import WeightSlot, slots_of


class KimiDelta(RecurrentLayer):
    """The recurrence of one layer. Rates and gates are products of two narrow matrices."""

    output_name = "o_proj"

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        own = Shares(config, placement.topology)
        shape, size = own.shape, own.shape.key_dim
        assert shape.key_heads == shape.heads and size == shape.value_dim
        convolved = [Columns(f"{part}_proj", own.values) for part in "qkv"]
        narrow = [Columns(name, slice(0, size)) for name in ("f_a_proj", "g_a_proj")]
        super().__init__(config, layer, placement, own, convolved, (Columns("b_proj", own.heads), *narrow))
        self._steps, self._gates = (
            ColumnLinear(size, (Columns(name, own.values),), False, placement) for name in ("f_b_proj", "g_b_proj")
        )
        self._norm = RmsNorm(size, config.norm_eps, False, placement)
        self._rates = placement.empty(shape.heads, 1).float()
        self._dt_bias = placement.empty(shape.heads * size).float()

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        qkv, b, f, g = parts
        convolved = self._convolve(qkv, ctx).chunk(3, dim=1)
        steps = F.softplus(self._steps(f, ctx) + self._dt_bias)
        decay = self._rates * steps.view(len(steps), self._shape.heads, -1)
        found = self._norm(self._recur(convolved, decay, b.sigmoid(), ctx), None, ctx)[0]
        return found.flatten(1) * self._gates(g, ctx).sigmoid()

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        yield from self._steps.slots(prefix)
        yield from self._gates.slots(prefix)
        yield from slots_of(prefix, o_norm=self._norm)
        yield rate_slot(f"{prefix}A_log", self._rates[None, None], slice(None), slice(None), self._shares.heads)
        yield WeightSlot(f"{prefix}dt_bias", self._dt_bias, (self._shares.values,))

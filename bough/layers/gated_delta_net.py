"""A gated delta net as a layer: a recurrence that forgets, and corrects what a key means instead of adding to it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.linear import Columns
from bough.layers.norm import RmsNorm
from bough.layers.placement import Placement
from bough.layers.recurrent import RecurrentLayer, Shares, rate_slot
from bough.layers.weights import WeightSlot, slots_of


class GatedDeltaNet(RecurrentLayer):
    """The recurrence of one layer. A head's result is normalised and scaled by gates."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        own = Shares(config, placement.topology)
        convolved = (Columns("q_proj", own.keys), Columns("k_proj", own.keys), Columns("v_proj", own.values))
        others = (Columns("z_proj", own.values), Columns("b_proj", own.heads), Columns("a_proj", own.heads))
        super().__init__(config, layer, placement, own, convolved, others)
        self._widths = [part.size for part in convolved]
        self._norm = RmsNorm(own.shape.value_dim, config.norm_eps, False, placement)
        self._rates, self._dt_bias = (placement.empty(own.shape.heads).float() for _ in range(2))

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        qkv, z, b, a = parts
        convolved = torch.split(self._convolve(qkv, ctx), self._widths, dim=1)
        decay = self._rates * F.softplus(a + self._dt_bias)
        found = self._recur(convolved, decay, b.sigmoid(), ctx)
        return self._norm(found, None, ctx)[0].flatten(1) * F.silu(z)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        yield from slots_of(prefix, norm=self._norm)
        heads = self._shares.heads
        yield rate_slot(f"{prefix}A_log", self._rates, heads)
        yield WeightSlot(f"{prefix}dt_bias", self._dt_bias, (heads,))

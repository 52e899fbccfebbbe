"""A gated delta net as a layer: a recurrence that forgets, and corrects what a key means instead of adding to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.norm import RmsNorm
from bough.layers.placement import Placement
from bough.layers.recurrent import RecurrentLayer, rate_slot
from bough.layers.weights import WeightSlot, slots_of


class GatedDeltaNet(RecurrentLayer):
    """The recurrence of one layer. A head's result is normalised and scaled by gates."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        shape = config.recurrent
        assert shape is not None
        keys, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
        others = {"z_proj": values, "b_proj": shape.heads, "a_proj": shape.heads}
        super().__init__(config, layer, placement, {"q_proj": keys, "k_proj": keys, "v_proj": values}, others)
        self._widths = [keys, keys, values]
        self._norm = RmsNorm(shape.value_dim, config.norm_eps, False, placement)
        self._rates, self._dt_bias = (placement.empty(shape.heads).float() for _ in range(2))

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        qkv, z, b, a = parts
        q, k, v = torch.split(self._convolve(qkv, ctx), self._widths, dim=1)
        decay = self._rates * F.softplus(a + self._dt_bias)
        found = self._recur(q, k, v, decay, b.sigmoid(), ctx)
        return self._norm(found, None, ctx)[0].flatten(1) * F.silu(z)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        yield from slots_of(prefix, norm=self._norm)
        yield rate_slot(f"{prefix}A_log", self._rates)
        yield WeightSlot(f"{prefix}dt_bias", self._dt_bias)

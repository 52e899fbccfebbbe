"""Mamba 2 as a layer: a recurrence that forgets and adds, at a rate that each token chooses, behind a gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.placement import Placement
from bough.layers.recurrent import RecurrentLayer, rate_slot
from bough.layers.weights import WeightSlot


class Mamba2(RecurrentLayer):
    """The recurrence of one layer. Its keys and queries are known as B and C, its rates as time steps."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        shape = config.recurrent
        assert shape is not None
        keys, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
        others = {"z_proj": values, "dt_proj": shape.heads}
        super().__init__(config, layer, placement, {"x_proj": shape.channels}, others, bias=shape.bias)
        self._widths = [values, keys, keys]
        self._norm = placement.empty(values)
        self._rates, self._d, self._dt_bias = (placement.empty(shape.heads).float() for _ in range(3))

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        inner, z, dt = parts
        x, key, query = torch.split(self._convolve(inner, ctx), self._widths, dim=1)
        steps = F.softplus(dt + self._dt_bias).clamp(*self._shape.step_limits)
        heads = x.float().view(len(x), self._shape.heads, -1)
        found = self._recur(query, key, heads * steps[..., None], self._rates * steps, None, ctx)
        gated = (found + heads * self._d[:, None]).flatten(1) * F.silu(z)
        of_group = gated.view(len(x), self._shape.norm_groups, -1)
        normed = of_group * torch.rsqrt(of_group.pow(2).mean(-1, keepdim=True) + self._shape.norm_eps)
        return normed.flatten(1).to(z.dtype) * self._norm

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        yield rate_slot(f"{prefix}A_log", self._rates)
        own = {"norm.weight": self._norm, "D": self._d, "dt_bias": self._dt_bias}
        yield from (WeightSlot(f"{prefix}{name}", weight) for name, weight in own.items())

"""Mamba 2 as a layer: a recurrence that forgets and adds, at a rate that each token chooses, behind a gate."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.linear import Columns
from bough.layers.placement import Placement
from bough.layers.recurrent import RecurrentLayer, Shares, rate_slot
from bough.layers.weights import WeightSlot


class Mamba2(RecurrentLayer):
    """The recurrence of one layer. Its keys and queries are known as B and C, its rates as time steps."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        own = Shares(config, placement.topology)
        convolved = (Columns("x_proj", own.values), Columns("b_proj", own.keys), Columns("c_proj", own.keys))
        others = (Columns("z_proj", own.values), Columns("dt_proj", own.heads))
        super().__init__(config, layer, placement, own, convolved, others, bias=own.shape.bias)
        self._widths = [part.size for part in convolved]
        self._norm = placement.empty(self._widths[0])
        self._groups = own.whole.key_heads  # a norm is taken of each group's values
        self._norm_groups = placement.topology.kv_slice_of(self._groups, "parts of the Mamba norm")
        self._sum_up = placement.ranks.all_reduce if self._groups < placement.topology.tp_size else None
        self._replicas = placement.topology.tp_size // self._groups
        self._rates, self._d, self._dt_bias = (placement.empty(own.shape.heads).float() for _ in range(3))

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        inner, z, dt = parts
        x, key, query = torch.split(self._convolve(inner, ctx), self._widths, dim=1)
        steps = F.softplus(dt + self._dt_bias).clamp(*self._shape.step_limits)
        heads = x.float().view(len(x), self._shape.heads, -1)
        found = self._recur((query, key, heads * steps[..., None]), self._rates * steps, None, ctx)
        gated = (found + heads * self._d[:, None]).flatten(1) * F.silu(z)
        of_group = gated.view(len(x), self._norm_groups.stop - self._norm_groups.start, -1)
        normed = of_group * torch.rsqrt(self._squares(of_group)[..., None] + self._shape.norm_eps)
        return normed.flatten(1).to(z.dtype) * self._norm

    def _squares(self, of_group: torch.Tensor) -> torch.Tensor:
        """The mean square of each group, of which a rank has several, or a part of one."""
        own = of_group.pow(2).mean(-1)
        if self._sum_up is None:
            return own
        of_all = own.new_zeros(len(own), self._groups)
        of_all[:, self._norm_groups] = own / self._replicas
        return self._sum_up(of_all)[:, self._norm_groups]

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        heads = self._shares.heads
        yield rate_slot(f"{prefix}A_log", self._rates, heads)
        yield WeightSlot(f"{prefix}norm.weight", self._norm, (self._shares.values,))
        yield WeightSlot(f"{prefix}D", self._d, (heads,))
        yield WeightSlot(f"{prefix}dt_bias", self._dt_bias, (heads,))

"""Recurrent layers, which stand where attention does in a block: gated short convolutions (LFM2), Mamba 2, gated delta
nets (Qwen3-Next) and Kimi's delta attention. All have a projection, a short convolution over the tokens, a state, and
the way back. A layer owns weights; the states of requests live in the pool.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.kernels.ops import WithSum
from bough.layers.linear import ColumnLinear, Columns, Products, RowLinear, features
from bough.layers.norm import Inputs, RmsNorm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of


class Shares:
    """The heads of a recurrent layer that this rank has, and the features of their values and keys."""

    def __init__(self, config: ModelConfig, topology: Topology) -> None:
        whole = config.recurrent
        assert whole is not None, "the model has no recurrent layers"
        self.whole, self.shape = whole, topology.recurrent_share(whole)
        self.heads = topology.slice_of(whole.heads, "recurrent heads")
        self.values = features(self.heads, whole.value_dim)
        self.keys = features(topology.kv_slice_of(whole.key_heads, "recurrent key heads"), whole.key_dim)


class RecurrentLayer(Products):
    """A subclass says in `_mix` what becomes of the projection: of its first part, which is convolved and holds all
    channels, and of the others."""

    output_name = "out_proj"

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        placement: Placement,
        shares: Shares,
        convolved: Sequence[Columns],
        others: Sequence[Columns],
        *,
        bias: bool = False,
    ) -> None:
        self._shares, self._convolved = shares, convolved
        self._shape, self._layer, self._ops = shares.shape, layer, placement.ops
        self._sizes = [self._shape.channels, *(part.size for part in others)]
        self._input = ColumnLinear(config.hidden_size, (*convolved, *others), bias, placement)
        self._output = RowLinear(self.output_name, shares.values, config.hidden_size, bias, placement)
        self._conv = placement.empty(self._shape.channels, self._shape.conv_width)
        self._conv_bias = placement.empty(self._shape.channels) if self._shape.conv_bias else None

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        """Goes on with the norm of x + residual; returns the result and that sum, at `ctx.logits_indices`."""
        projected, total = self._input.after(inputs, ctx)
        mixed = self._mix(torch.split(projected, self._sizes, dim=1), ctx)
        if ctx.logits_indices is not None:
            mixed, total = (self._ops.take_rows(rows, ctx.logits_indices) for rows in (mixed, total))
        return self._output(mixed, ctx), total

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        """[tokens, heads * value_dim]"""
        raise NotImplementedError

    def _convolve(self, x: torch.Tensor, ctx: ForwardContext, *, silu: bool = True) -> torch.Tensor:
        states = ctx.pool.states
        assert states is not None
        weights = self._conv, self._conv_bias, states.tails[self._layer]
        return states.advance(partial(self._ops.causal_conv_, silu=silu), (x,), weights, ctx.batch.states)

    def _recur(
        self, qkv: Sequence[torch.Tensor], decay: torch.Tensor, beta: torch.Tensor | None, ctx: ForwardContext
    ) -> torch.Tensor:
        """What the queries find once the layer's matrices have gone on; of q, k and v all heads stand side by side.
        [tokens, heads, value_dim]"""
        states = ctx.pool.states
        assert states is not None
        shape, tokens = self._shape, len(decay)
        q, k = (x.view(tokens, shape.key_heads, shape.key_dim) for x in qkv[:2])
        v = qkv[2].view(tokens, shape.heads, shape.value_dim)
        matrices = states.matrices[self._layer]
        return states.advance(self._ops.recurrence_, (q, k, v, decay, beta), (matrices,), ctx.batch.states)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        first = 0
        for part in self._convolved:
            name, own = part.name.replace("_proj", "_conv1d"), slice(first, first + part.size)
            yield WeightSlot(f"{prefix}{name}.weight", self._conv[own, None], (part.held,))
            if self._conv_bias is not None:
                yield WeightSlot(f"{prefix}{name}.bias", self._conv_bias[own], (part.held,))
            first = own.stop


def rate_slot(name: str, rates: torch.Tensor, *index: slice) -> WeightSlot:
    """How fast heads forget, of which checkpoints have the logarithms without their sign."""

    def store(first: int, band: torch.Tensor) -> None:
        rates[first : first + len(band)] = -band.float().exp()

    return WeightSlot(name, rates, index, store=store)


class ShortConv(RecurrentLayer):
    """A gated short convolution: one gate before it and one behind it. Its state is the last few tokens alone."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        own = Shares(config, placement.topology)
        x, *gates = (Columns(f"{part}_proj", own.values) for part in "xbc")
        super().__init__(config, layer, placement, own, (x,), gates, bias=own.shape.bias)

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        x, before, behind = parts
        return behind * self._convolve(before * x, ctx, silu=False)


class Mamba2(RecurrentLayer):
    """A recurrence that forgets and adds, at a rate that each token chooses, behind a gate. Its keys and queries are
    known as B and C, its rates as time steps."""

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


class GatedDeltaNet(RecurrentLayer):
    """A recurrence that forgets, and corrects what a key means instead of adding to it. A head's result is normalised
    and scaled by gates."""

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
        found = self._recur(convolved, self._rates * F.softplus(a + self._dt_bias), b.sigmoid(), ctx)
        return self._norm(found, None, ctx)[0].flatten(1) * F.silu(z)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        yield from slots_of(prefix, norm=self._norm)
        heads = self._shares.heads
        yield rate_slot(f"{prefix}A_log", self._rates, heads)
        yield WeightSlot(f"{prefix}dt_bias", self._dt_bias, (heads,))


class KimiDelta(RecurrentLayer):
    """A gated delta net in which every channel of a key decays at a rate of its own. Rates and gates are products of
    two narrow matrices."""

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
        yield from slots_of(prefix, o_norm=self._norm)
        yield rate_slot(f"{prefix}A_log", self._rates[None, None], slice(None), slice(None), self._shares.heads)
        yield WeightSlot(f"{prefix}dt_bias", self._dt_bias, (self._shares.values,))

"""What recurrent layers share: a projection, a short convolution over the tokens, a state, and the way back.

The layer owns weights; the states of requests live in the pool. It stands where attention does in a block.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.kernels.ops import WithSum
from bough.layers.linear import ColumnLinear, Columns, RowLinear, features
from bough.layers.norm import Inputs
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class Shares:
    """The heads of a recurrent layer that this rank has, and the features of their values and keys."""

    def __init__(self, config: ModelConfig, topology: Topology) -> None:
        whole = config.recurrent
        assert whole is not None, "the model has no recurrent layers"
        self.whole, self.shape = whole, topology.recurrent_share(whole)
        self.heads = topology.slice_of(whole.heads, "recurrent heads")
        self.values = features(self.heads, whole.value_dim)
        self.keys = features(topology.kv_slice_of(whole.key_heads, "recurrent key heads"), whole.key_dim)


class RecurrentLayer:
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
        yield from self._input.slots(prefix)
        first = 0
        for part in self._convolved:
            name, own = part.name.replace("_proj", "_conv1d"), slice(first, first + part.size)
            yield WeightSlot(f"{prefix}{name}.weight", self._conv[own, None], (part.held,))
            if self._conv_bias is not None:
                yield WeightSlot(f"{prefix}{name}.bias", self._conv_bias[own], (part.held,))
            first = own.stop
        yield from self._output.slots(prefix)


def rate_slot(name: str, rates: torch.Tensor, *index: slice) -> WeightSlot:
    """How fast heads forget, of which checkpoints have the logarithms without their sign."""

    def store(first: int, band: torch.Tensor) -> None:
        rates[first : first + len(band)] = -band.float().exp()

    return WeightSlot(name, rates, index, store=store)

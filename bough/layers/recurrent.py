"""What recurrent layers share: a projection, a short convolution over the tokens, a state, and the way back.

The layer owns weights; the states of requests live in the pool. It stands where attention does in a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from bough.attention.context import ForwardContext
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.layers.linear import ColumnLinear, Columns, RowLinear
from bough.layers.norm import NormLayer
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class RecurrentLayer:
    """A subclass says in `_mix` what becomes of the projection: of its first part, which is convolved and holds all
    channels, and of the others. `convolved` and `others` have the names and sizes of what the checkpoint has of it."""

    output_name = "out_proj"

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        placement: Placement,
        convolved: Mapping[str, int],
        others: Mapping[str, int],
        *,
        bias: bool = False,
    ) -> None:
        recurrent = config.recurrent
        assert recurrent is not None, "the model has no recurrent layers"
        if placement.topology.tp_size > 1:
            raise ModelError(f"{config.architecture} has recurrent layers, which one rank alone can compute.")
        self._shape, self._layer, self._ops = recurrent, layer, placement.ops
        self._sizes = [sum(convolved.values()), *others.values()]
        columns = [Columns(name, slice(0, size)) for name, size in {**convolved, **others}.items()]
        self._input = ColumnLinear(config.hidden_size, columns, bias, placement)
        inner = slice(0, recurrent.heads * recurrent.value_dim)
        self._output = RowLinear(self.output_name, inner, config.hidden_size, bias, placement)
        self._conv = placement.empty(recurrent.channels, recurrent.conv_width)
        self._conv_bias = placement.empty(recurrent.channels) if recurrent.conv_bias else None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: NormLayer,
        positions: torch.Tensor,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Goes on with the norm of x + residual; returns the result and that sum, at `ctx.logits_indices`."""
        projected, total = self._input.after(norm, x, residual, ctx)
        mixed = self._mix(torch.split(projected, self._sizes, dim=1), ctx)
        if ctx.logits_indices is not None:
            mixed, total = (self._ops.take_rows(rows, ctx.logits_indices) for rows in (mixed, total))
        return self._output(mixed, ctx), total

    def _mix(self, parts: tuple[torch.Tensor, ...], ctx: ForwardContext) -> torch.Tensor:
        """[tokens, heads * value_dim]"""
        raise NotImplementedError

    def _convolve(self, x: torch.Tensor, ctx: ForwardContext, *, silu: bool = True) -> torch.Tensor:
        assert ctx.pool.states is not None
        tails = ctx.pool.states.tails[self._layer]
        return self._ops.causal_conv_(x, self._conv, self._conv_bias, tails, ctx.batch.states, silu)

    def _recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """What the queries find once the layer's matrices have gone on; of q, k and v all heads stand side by side.
        [tokens, heads, value_dim]"""
        assert ctx.pool.states is not None
        shape, tokens = self._shape, len(q)
        q, k = (x.view(tokens, shape.key_heads, shape.key_dim) for x in (q, k))
        v = v.view(tokens, shape.heads, shape.value_dim)
        matrices = ctx.pool.states.matrices[self._layer]
        return self._ops.recurrence_(q, k, v, decay, beta, matrices, ctx.batch.states)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._input.slots(prefix)
        yield from self._conv_slots(prefix)
        yield from self._output.slots(prefix)

    def _conv_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}conv1d.weight", self._conv[:, None])
        if self._conv_bias is not None:
            yield WeightSlot(f"{prefix}conv1d.bias", self._conv_bias)


def rate_slot(name: str, rates: torch.Tensor) -> WeightSlot:
    """How fast heads forget, of which checkpoints have the logarithms without their sign."""

    def store(first: int, band: torch.Tensor) -> None:
        rates[first : first + len(band)] = -band.float().exp()

    return WeightSlot(name, rates, store=store)

"""Blocks that many families share: norms, attention and MLP, one after the other or side by side.

The hidden states travel as two tensors whose sum they are, `x` and `residual`, so that each addition is done together
with the norm that follows it. Before the first block there is no residual.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.kernels.ops import WithSum
from bough.layers.attention import SelfAttention
from bough.layers.latent_attention import LatentAttention
from bough.layers.mlp import make_mlp
from bough.layers.norm import NO_NORM, Inputs, NormLayer, make_norm
from bough.layers.placement import Placement
from bough.layers.recurrent import RecurrentLayer
from bough.layers.weights import WeightSlot, slots_of

Stream = tuple[torch.Tensor, torch.Tensor | None]  # x and residual
Mixer = SelfAttention | LatentAttention | RecurrentLayer
MakeRecurrent = Callable[[ModelConfig, int, Placement], RecurrentLayer]


def make_mixer(config: ModelConfig, layer: int, placement: Placement, recurrent: MakeRecurrent | None = None) -> Mixer:
    """What lets tokens of this layer know of those before them."""
    if config.recurs(layer):
        assert recurrent is not None, "the family says which layer has the state"
        return recurrent(config, layer, placement)
    return (SelfAttention if config.latent is None else LatentAttention)(config, layer, placement)


class Block(Protocol):
    """One layer of a decoder."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> Stream: ...

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """What fills its parts, which are its public attributes, under the names of checkpoints; `prefix` ends in a
        dot."""
        return slots_of(prefix, **{name: part for name, part in vars(self).items() if part and name[0] != "_"})


class PreNormBlock(Block):
    """Attention, or the `recurrent` layer that takes its place where the model has a state, then an MLP, each after a
    norm and added to the residual."""

    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement, recurrent: MakeRecurrent | None = None
    ) -> None:
        normed = config.embedding_norm and layer == 0
        self.input_layernorm: NormLayer = NO_NORM if normed else make_norm(config, placement)
        self.self_attn = make_mixer(config, layer, placement, recurrent)
        self.post_attention_layernorm = make_norm(config, placement)
        self.mlp = make_mlp(config, layer, placement)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        x, residual = self.self_attn(Inputs(x, residual, self.input_layernorm), ctx)
        return self.mlp(Inputs(x, residual, self.post_attention_layernorm), ctx)


class PostNormBlock(Block):
    """Attention, then an MLP; a norm follows each addition, so there is no residual beside the hidden states."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = SelfAttention(config, layer, placement)
        self.post_attention_layernorm = make_norm(config, placement)
        self.mlp = make_mlp(config, layer, placement)
        self.post_mlp_layernorm = make_norm(config, placement)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> Stream:
        x = self.post_attention_layernorm(*self.self_attn(Inputs(x, residual), ctx), ctx)[0]
        return self.post_mlp_layernorm(*self.mlp(Inputs(x), ctx), ctx)[0], None


class ParallelBlock(Block):
    """Attention and MLP of the same hidden states, both added to the residual; each after a norm of its own, or both
    after one."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement, *, one_norm: bool = False) -> None:
        self.input_layernorm = make_norm(config, placement)
        self.self_attn = SelfAttention(config, layer, placement)
        self.mlp = make_mlp(config, layer, placement)
        self.post_attention_layernorm = None if one_norm else make_norm(config, placement)
        self._take_rows = placement.ops.take_rows

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        if self.post_attention_layernorm is not None:
            attended, total = self.self_attn(Inputs(x, residual, self.input_layernorm), ctx)
            return attended + self.mlp(Inputs(total, None, self.post_attention_layernorm), ctx)[0], total
        normed, total = self.input_layernorm(x, residual, ctx)
        attended, normed = self.self_attn(Inputs(normed), ctx)
        if ctx.logits_indices is not None:
            total = self._take_rows(total, ctx.logits_indices)
        return attended + self.mlp(Inputs(normed), ctx)[0], total


class SandwichBlock(Block):
    """Attention, then an MLP, each between two norms; the second is taken before adding to the residual. Without the
    norms `before` there is the second alone."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement, *, before: bool = True) -> None:
        self.input_layernorm = make_norm(config, placement) if before else NO_NORM
        self.self_attn = SelfAttention(config, layer, placement)
        self.post_attention_layernorm = make_norm(config, placement)
        self.pre_feedforward_layernorm = make_norm(config, placement) if before else NO_NORM
        self.mlp = make_mlp(config, layer, placement)
        self.post_feedforward_layernorm = make_norm(config, placement)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        x, residual = self.self_attn(Inputs(x, residual, self.input_layernorm), ctx)
        x = self.post_attention_layernorm(x, None, ctx)[0]
        x, residual = self.mlp(Inputs(x, residual, self.pre_feedforward_layernorm), ctx)
        return self.post_feedforward_layernorm(x, None, ctx)[0], residual


class SingleBlock(Block):
    """One thing after a norm, added to the residual: attention, a recurrent layer or an MLP."""

    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement, recurrent: MakeRecurrent | None = None
    ) -> None:
        self._norm, self._take_rows = make_norm(config, placement), placement.ops.take_rows
        mixes = config.attends(layer) or config.recurs(layer)
        self._mixer = make_mixer(config, layer, placement, recurrent) if mixes else None
        self._mlp = None if mixes else make_mlp(config, layer, placement)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        if self._mixer is not None:
            return self._mixer(Inputs(x, residual, self._norm), ctx)
        assert self._mlp is not None
        if ctx.logits_indices is not None:
            x = self._take_rows(x, ctx.logits_indices)
            residual = None if residual is None else self._take_rows(residual, ctx.logits_indices)
        return self._mlp(Inputs(x, residual, self._norm), ctx)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        mixer = self._mixer or self._mlp
        assert mixer is not None
        return slots_of(prefix, norm=self._norm, mixer=mixer)

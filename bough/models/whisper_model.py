"""Whisper's modules: an encoder of windows, and a decoder whose layers have one more that attends to what it gives."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext, Heard
from bough.core.model_config import ModelConfig
from bough.kernels.ops import WithSum
from bough.layers.blocks import Block, PreNormBlock
from bough.layers.linear import ColumnLinear, Columns, Products, RowLinear
from bough.layers.mlp import PlainMLP
from bough.layers.norm import Inputs, make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of
from bough.models.decoder import Decoder


class HearingAttention(Products):
    """Attends to a window: what each row has heard or, in the encoder, the window itself."""

    def __init__(self, config: ModelConfig, layer: int, heads: int, placement: Placement) -> None:
        assert config.speech is not None
        width, self._heads, self._layer = config.hidden_size, heads, layer
        self._aligned = [head for of_layer, head in config.speech.alignment if of_layer == layer]
        query, key, value = (Columns(f"{part}_proj", slice(0, width)) for part in "qkv")
        self._query = ColumnLinear(width, (query,), True, placement)
        self._heard = ColumnLinear(width, (key, value), True, placement)
        self._output = RowLinear("out_proj", slice(0, width), width, True, placement)

    def hear(self, encoded: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Keys and values [2, heads, positions, head_dim] of the encoder's output [positions, hidden_size]."""
        return self._heard(encoded, ctx).view(len(encoded), 2, self._heads, -1).permute(1, 2, 0, 3).contiguous()

    def within(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        """All positions of a window attend to all."""
        x, total = inputs.taken(ctx)
        queries = self._query(x, ctx).view(len(x), self._heads, -1).transpose(0, 1)
        found = F.scaled_dot_product_attention(queries[None], *self.hear(x, ctx)[:, None])[0]
        return self._output(found.transpose(0, 1).flatten(1), ctx), total

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        queries, total = self._query.after(inputs, ctx)
        starts = ctx.batch.query_starts.tolist()
        if ctx.logits_indices is not None:  # only those tokens are left
            starts = np.searchsorted(ctx.logits_indices.cpu().numpy(), starts).tolist()
        heads = queries.view(len(queries), self._heads, -1).transpose(0, 1)
        found = torch.empty_like(heads)
        for place, (heard, first, end) in enumerate(zip(ctx.heard, starts[:-1], starts[1:], strict=True)):
            if first < end:
                key, value = heard[self._layer]
                found[:, first:end] = F.scaled_dot_product_attention(heads[None, :, first:end], key[None], value[None])
                if place in ctx.aligned:
                    scores = heads[self._aligned, first:end] @ key[self._aligned].transpose(1, 2)
                    ctx.aligned[place].append((scores * key.shape[-1] ** -0.5).softmax(-1))
        return self._output(found.transpose(0, 1).flatten(1), ctx), total


class HearingBlock(PreNormBlock):
    """With attention to what was heard between that to the tokens before and the MLP."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        self.encoder_attn_layer_norm = make_norm(config, placement)
        self.encoder_attn = HearingAttention(config, layer, config.num_heads, placement)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        x, residual = self.self_attn(Inputs(x, residual, self.input_layernorm), ctx)
        x, residual = self.encoder_attn(Inputs(x, residual, self.encoder_attn_layer_norm), ctx)
        return self.mlp(Inputs(x, residual, self.post_attention_layernorm), ctx)


class EncoderLayer(Block):
    def __init__(self, config: ModelConfig, heads: int, placement: Placement) -> None:
        self.self_attn_layer_norm, self.final_layer_norm = make_norm(config, placement), make_norm(config, placement)
        self.self_attn, self.mlp = HearingAttention(config, -1, heads, placement), PlainMLP(config, placement)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        x, residual = self.self_attn.within(Inputs(x, residual, self.self_attn_layer_norm), ctx)
        return self.mlp(Inputs(x, residual, self.final_layer_norm), ctx)


class WhisperModel(Decoder):
    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        assert config.speech is not None
        super().__init__(config, placement, HearingBlock)
        width, sizes = config.hidden_size, config.speech.encoder
        shapes = {"conv1.weight": (width, sizes["num_mel_bins"], 3), "conv1.bias": (width,)}
        shapes |= {"conv2.weight": (width, width, 3), "conv2.bias": (width,)}
        shapes |= {"embed_positions.weight": (sizes["max_source_positions"], width)}
        self._stem = {name: placement.empty(*shape) for name, shape in shapes.items()}
        own, heads = replace(config, intermediate_size=sizes["encoder_ffn_dim"]), sizes["encoder_attention_heads"]
        self._encoder = {f"layers.{i}": EncoderLayer(own, heads, placement) for i in range(sizes["encoder_layers"])}
        self._encoder_norm = make_norm(config, placement)

    def hear(self, features: torch.Tensor, ctx: ForwardContext) -> Heard:
        """What the decoder's layers attend to, of features [mel_bins, frames]."""
        first, first_bias, second, second_bias, positions = self._stem.values()
        given = features[None].to(self._placement.device, self._placement.dtype)
        given = F.gelu(F.conv1d(given, first, first_bias, padding=1))
        x, residual = F.gelu(F.conv1d(given, second, second_bias, padding=1, stride=2))[0].T + positions, None
        for layer in self._encoder.values():
            x, residual = layer(x, residual, ctx)
        encoded, _ = self._encoder_norm(x, residual, ctx)
        return tuple(cast(HearingBlock, block).encoder_attn.hear(encoded, ctx) for block in self._blocks)

    def slots(self) -> Iterator[WeightSlot]:
        """Keys have no bias, which would change no attention: it stays 0 beside those of queries and values."""
        stem = (WeightSlot(f"encoder.{name}", tensor) for name, tensor in self._stem.items())
        for slot in (*super().slots(), *stem, *slots_of("encoder.", layer_norm=self._encoder_norm, **self._encoder)):
            if slot.name.endswith("k_proj.bias"):
                slot.target.zero_()
            else:
                yield slot

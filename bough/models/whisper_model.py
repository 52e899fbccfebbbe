"""Whisper's modules: an encoder of a window of sound, and a decoder whose layers attend to what it has heard."""

from __future__ import annotations

import itertools
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
from bough.layers.linear import ColumnLinear, Columns, RowLinear
from bough.layers.moe import make_mlp
from bough.layers.norm import Inputs, make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot
from bough.models.decoder import Decoder


class CrossAttention:
    """Attends to what each row has heard."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        assert config.speech is not None
        width, self._heads, self._layer = config.hidden_size, config.num_heads, layer
        self._aligned = [head for of_layer, head in config.speech.alignment if of_layer == layer]
        query, key, value = (Columns(f"{part}_proj", slice(0, width)) for part in "qkv")
        self._query = ColumnLinear(width, (query,), True, placement)
        self._heard = ColumnLinear(width, (key, value), True, placement)
        self._output = RowLinear("out_proj", slice(0, width), width, True, placement)

    def hear(self, encoded: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Keys and values [2, heads, positions, head_dim] of the encoder's output [positions, hidden_size]."""
        both = self._heard(encoded, ctx)
        return both.view(len(encoded), 2, self._heads, -1).permute(1, 2, 0, 3).contiguous()

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        queries, total = self._query.after(inputs, ctx)
        starts = ctx.batch.query_starts.tolist()
        if ctx.logits_indices is not None:  # only those tokens are left
            starts = np.searchsorted(ctx.logits_indices.numpy(), starts).tolist()
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

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part in (self._query, self._heard, self._output):
            yield from part.slots(prefix)


class HearingBlock(PreNormBlock):
    """With attention to what was heard between that to the tokens before and the MLP."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        self.encoder_attn_layer_norm = make_norm(config, placement)
        self.encoder_attn = CrossAttention(config, layer, placement)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        x, residual = self.self_attn(Inputs(x, residual, self.input_layernorm), ctx)
        x, residual = self.encoder_attn(Inputs(x, residual, self.encoder_attn_layer_norm), ctx)
        return self.mlp(Inputs(x, residual, self.post_attention_layernorm), ctx)


class WindowAttention:
    """Of all positions of a window to all."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        width, self._heads = config.hidden_size, config.num_heads
        parts = [Columns(f"{part}_proj", slice(0, width)) for part in "qkv"]
        self._qkv = ColumnLinear(width, parts, True, placement)
        self._output = RowLinear("o_proj", slice(0, width), width, True, placement)

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        rows, total = self._qkv.after(inputs, ctx)
        query, key, value = rows.view(len(rows), 3, 1, self._heads, -1).permute(1, 2, 3, 0, 4)
        found = F.scaled_dot_product_attention(query, key, value)[0]
        return self._output(found.transpose(0, 1).flatten(1), ctx), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._qkv.slots(prefix)
        yield from self._output.slots(prefix)


class EncoderBlock(Block):
    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.input_layernorm = make_norm(config, placement)
        self.self_attn = WindowAttention(config, placement)
        self.post_attention_layernorm = make_norm(config, placement)
        self.mlp = make_mlp(config, layer, placement)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext) -> WithSum:
        x, residual = self.self_attn(Inputs(x, residual, self.input_layernorm), ctx)
        return self.mlp(Inputs(x, residual, self.post_attention_layernorm), ctx)


class WhisperEncoder:
    """Two convolutions, of which the second halves the frames, and blocks that see all of a window."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        assert config.speech is not None
        sizes, width = config.speech.encoder, config.hidden_size
        own = replace(config, num_heads=sizes["encoder_attention_heads"], intermediate_size=sizes["encoder_ffn_dim"])
        self._convolutions = {
            name: (placement.empty(width, inputs, 3), placement.empty(width))
            for name, inputs in (("conv1", sizes["num_mel_bins"]), ("conv2", width))
        }
        self._positions = placement.empty(config.speech.positions, width)
        self._blocks = [EncoderBlock(own, layer, placement) for layer in range(sizes["encoder_layers"])]
        self._norm = make_norm(config, placement)

    def __call__(self, features: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[positions, hidden_size] of features [mel_bins, frames]."""
        frames = features.to(self._positions.dtype)
        for stride, (weight, bias) in enumerate(self._convolutions.values(), 1):
            frames = F.gelu(F.conv1d(frames, weight, bias, stride, padding=1))
        x, residual = frames.T + self._positions, None
        for block in self._blocks:
            x, residual = block(x, residual, ctx)
        return self._norm(x, residual, ctx)[0]

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for name, (weight, bias) in self._convolutions.items():
            yield from (WeightSlot(f"{prefix}{name}.weight", weight), WeightSlot(f"{prefix}{name}.bias", bias))
        yield WeightSlot(f"{prefix}embed_positions.weight", self._positions)
        for layer, block in enumerate(self._blocks):
            yield from block.slots(f"{prefix}layers.{layer}.")
        yield from self._norm.slots(f"{prefix}layer_norm.")


class WhisperModel(Decoder):
    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config, placement, HearingBlock)
        self._encoder = WhisperEncoder(config, placement)

    def hear(self, features: torch.Tensor, ctx: ForwardContext) -> Heard:
        """What the decoder's layers attend to, of features [mel_bins, frames]."""
        encoded = self._encoder(features, ctx)
        return tuple(cast(HearingBlock, block).encoder_attn.hear(encoded, ctx) for block in self._blocks)

    def slots(self) -> Iterator[WeightSlot]:
        """Keys have no bias, which would change no attention: it stays 0 beside those of queries and values."""
        for slot in itertools.chain(super().slots(), self._encoder.slots("encoder.")):
            if slot.name.endswith("k_proj.bias"):
                slot.target.zero_()
            else:
                yield slot

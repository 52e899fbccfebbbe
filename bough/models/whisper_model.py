"""Whisper's modules: the encoder is Transformers'; the decoder's layers are ours, with one more that attends to it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext, Heard
from bough.core.model_config import ModelConfig
from bough.layers.attention import SelfAttention
from bough.layers.blocks import Block
from bough.layers.linear import ColumnLinear, Columns, RowLinear
from bough.layers.moe import make_mlp
from bough.layers.norm import NO_NORM, NormLayer, make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of
from bough.models.decoder import Decoder


def without_key_bias(slots: Iterator[WeightSlot]) -> Iterator[WeightSlot]:
    """Keys have no bias, which would change no attention: it stays 0 beside those of queries and values."""
    for slot in slots:
        if slot.name.endswith("k_proj.bias"):
            slot.target.zero_()
        else:
            yield slot


class CrossAttention:
    """Attends to what each row has heard."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        width, self._heads, self._layer = config.hidden_size, config.num_heads, layer
        whole = slice(0, width)
        self._query = ColumnLinear(width, (Columns("q_proj", whole),), True, placement)
        self._heard = ColumnLinear(width, (Columns("k_proj", whole), Columns("v_proj", whole)), True, placement)
        self._output = RowLinear("o_proj", whole, width, True, placement)

    def hear(self, encoded: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Keys and values [2, heads, positions, head_dim] of the encoder's output [positions, hidden_size]."""
        both = self._heard.after(NO_NORM, encoded, None, ctx)[0]
        return both.view(len(encoded), 2, self._heads, -1).permute(1, 2, 0, 3).contiguous()

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: NormLayer, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, total = self._query.after(norm, x, residual, ctx)
        starts, ends = ctx.batch.query_starts, ctx.logits_indices
        if ends is not None:  # only those tokens are left
            starts = np.searchsorted(ends.numpy(), starts).astype(np.int32)
        heads = queries.view(len(queries), self._heads, -1).transpose(0, 1)
        found = torch.empty_like(heads)
        for row, heard in enumerate(ctx.heard):
            at = slice(int(starts[row]), int(starts[row + 1]))
            if at.start < at.stop:
                key, value = heard[self._layer]
                found[:, at] = F.scaled_dot_product_attention(heads[None, :, at], key[None], value[None])[0]
        return self._output(found.transpose(0, 1).flatten(1), ctx), total

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for part in (self._query, self._heard, self._output):
            yield from part.slots(prefix)


class HearingBlock(Block):
    """Attention to the tokens before, attention to what was heard, an MLP: each after a norm, added to the residual."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self._norms = [make_norm(config, placement) for _ in range(3)]
        self._attention = SelfAttention(config, layer, placement)
        self.cross = CrossAttention(config, layer, placement)
        self._mlp = make_mlp(config, layer, placement)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._attention(x, residual, self._norms[0], positions, ctx)
        x, residual = self.cross(x, residual, self._norms[1], ctx)
        return self._mlp(x, residual, self._norms[2], ctx)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        parts = {
            "input_layernorm": self._norms[0],
            "self_attn": self._attention,
            "cross_attn_layernorm": self._norms[1],
            "cross_attn": self.cross,
            "post_attention_layernorm": self._norms[2],
            "mlp": self._mlp,
        }
        return without_key_bias(slots_of(prefix, **parts))


class WhisperModel(Decoder):
    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        from transformers import WhisperConfig  # which takes seconds, and other models do without
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        assert config.speech is not None
        self._cross: list[CrossAttention] = []
        super().__init__(config, placement, self._block)
        speech = config.speech
        theirs = WhisperConfig(
            d_model=config.hidden_size,
            encoder_layers=speech.layers,
            encoder_attention_heads=speech.heads,
            encoder_ffn_dim=speech.inner,
            num_mel_bins=speech.mel_bins,
            max_source_positions=speech.positions,
            activation_function=config.activation,
        )
        with torch.device("meta"):
            encoder = WhisperEncoder(theirs)
        encoder.requires_grad_(False)
        self._encoder = encoder.to(placement.dtype).to_empty(device=placement.device).eval()

    def _block(self, config: ModelConfig, layer: int, placement: Placement) -> HearingBlock:
        block = HearingBlock(config, layer, placement)
        self._cross.append(block.cross)
        return block

    def hear(self, features: torch.Tensor, ctx: ForwardContext) -> Heard:
        """What the decoder's layers attend to, of features [mel_bins, frames]."""
        encoded = self._encoder(features[None].to(self._placement.dtype)).last_hidden_state[0]
        return tuple(cross.hear(encoded, ctx) for cross in self._cross)

    def slots(self) -> Iterator[WeightSlot]:
        yield from super().slots()
        for name, tensor in self._encoder.named_parameters():
            yield WeightSlot(f"encoder.{name}", tensor.data)

"""Whisper's modules: the encoder is Transformers'; the decoder's layers are ours, with one more that attends to it."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from bough.attention.context import ForwardContext, Heard
from bough.core.model_config import ModelConfig
from bough.kernels.ops import WithSum
from bough.layers.blocks import PreNormBlock
from bough.layers.linear import ColumnLinear, Columns, RowLinear
from bough.layers.norm import Inputs, make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot
from bough.models.decoder import Decoder

NO_STEP = cast(ForwardContext, None)  # of a window: adapters alone would look at one, and Whisper has none


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

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Keys have no bias, which would change no attention: it stays 0 beside those of queries and values."""
        for slot in super().slots(prefix):
            if slot.name.endswith("k_proj.bias"):
                slot.target.zero_()
            else:
                yield slot


class Product(torch.nn.Module):
    """A linear layer of Transformers' encoder whose weight is kept and multiplied as those of the decoder are."""

    def __init__(self, layer: torch.nn.Linear, name: str, placement: Placement) -> None:
        super().__init__()
        columns = (Columns(name, slice(0, layer.out_features)),)
        self.own = ColumnLinear(layer.in_features, columns, layer.bias is not None, placement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x[0], NO_STEP)[None]


class WhisperModel(Decoder):
    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        from transformers import WhisperConfig  # which takes seconds, and other models do without
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        assert config.speech is not None
        super().__init__(config, placement, HearingBlock)
        sizes = {"d_model": config.hidden_size, **config.speech.encoder}
        with torch.device("meta"):
            encoder = WhisperEncoder(WhisperConfig(**sizes, activation_function=config.activation))
        self._products: dict[str, Product] = {}  # by the name of what they are a part of
        for name, layer in [*encoder.named_modules()]:
            if isinstance(layer, torch.nn.Linear):
                self._products[name] = Product(layer, name.rpartition(".")[2], placement)
                encoder.set_submodule(name, self._products[name])
        self._encoder = encoder.to(placement.dtype).to_empty(device=placement.device).eval().requires_grad_(False)

    def hear(self, features: torch.Tensor, ctx: ForwardContext) -> Heard:
        """What the decoder's layers attend to, of features [mel_bins, frames]."""
        given = features[None].to(self._placement.device, self._placement.dtype)
        encoded = self._encoder(given).last_hidden_state[0]
        return tuple(cast(HearingBlock, block).encoder_attn.hear(encoded, ctx) for block in self._blocks)

    def slots(self) -> Iterator[WeightSlot]:
        yield from super().slots()
        yield from (WeightSlot(f"encoder.{name}", each.data) for name, each in self._encoder.named_parameters())
        for name, product in self._products.items():
            yield from product.own.slots(f"encoder.{name.rpartition('.')[0]}.")

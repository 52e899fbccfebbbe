"""Llama, and the families that differ from it only in what `ModelConfig` says.

Mistral adds a sliding window, Qwen2 biases on query, key and value, Qwen3 a norm on each query and key head: flags of
the attention layer, so they need no class of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.attention import SelfAttention
from bough.layers.mlp import GatedMLP
from bough.layers.norm import RmsNorm
from bough.layers.placement import Placement
from bough.layers.rope import RopeTable
from bough.layers.weights import WeightSlot
from bough.models.decoder import Decoder


class LlamaBlock:
    """Attention and feed-forward, each after a norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        norm = (config.hidden_size, config.norm_eps, config.norm_plus_one, placement)
        self._input_norm = RmsNorm(*norm)
        self._attention = SelfAttention(config, layer, placement)
        self._mlp_norm = RmsNorm(*norm)
        self._mlp = GatedMLP(config, placement)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rope: RopeTable,
        positions: torch.Tensor,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._attention(x, residual, self._input_norm, rope, positions, ctx)
        return self._mlp(x, residual, self._mlp_norm)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._input_norm.slots(f"{prefix}input_layernorm")
        yield from self._attention.slots(f"{prefix}self_attn.")
        yield from self._mlp_norm.slots(f"{prefix}post_attention_layernorm")
        yield from self._mlp.slots(f"{prefix}mlp.")


class Llama(Decoder):
    """LlamaForCausalLM and its relatives."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config, placement, LlamaBlock)

"""Gemma 3: norms after attention and feed-forward as well as before; most layers see a window, with its own rotation.

The multimodal checkpoints hold the same text model under another name; here it answers to text alone.
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


class Gemma3Block:
    """Attention and feed-forward, each between two norms; the second is taken before adding to the stream."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        norm = (config.hidden_size, config.norm_eps, config.norm_plus_one, placement)
        self._input_norm = RmsNorm(*norm)
        self._attention = SelfAttention(config, layer, placement)
        self._attention_norm = RmsNorm(*norm)
        self._mlp_input_norm = RmsNorm(*norm)
        self._mlp = GatedMLP(config, placement)
        self._mlp_norm = RmsNorm(*norm)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rope: RopeTable,
        positions: torch.Tensor,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._attention(x, residual, self._input_norm, rope, positions, ctx)
        x, residual = self._mlp(self._attention_norm(x)[0], residual, self._mlp_input_norm)
        return self._mlp_norm(x)[0], residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._input_norm.slots(f"{prefix}input_layernorm")
        yield from self._attention.slots(f"{prefix}self_attn.")
        yield from self._attention_norm.slots(f"{prefix}post_attention_layernorm")
        yield from self._mlp_input_norm.slots(f"{prefix}pre_feedforward_layernorm")
        yield from self._mlp.slots(f"{prefix}mlp.")
        yield from self._mlp_norm.slots(f"{prefix}post_feedforward_layernorm")


class Gemma3(Decoder):
    """Gemma3ForCausalLM, and the text model inside Gemma3ForConditionalGeneration."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        multimodal = config.architecture == "Gemma3ForConditionalGeneration"
        super().__init__(config, placement, Gemma3Block, prefix="language_model." if multimodal else "")

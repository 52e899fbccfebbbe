"""Phi-3 and Phi-4: Llama with fused projections, of which a part of each head may rotate, stretched by LongRoPE."""

from __future__ import annotations

from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.names import GGUF_FUSED_MLP, Names, fused_gate_up, fused_qkv


class Phi3(ModelFamily):
    architectures = ("Phi3ForCausalLM",)
    model_types = ("phi3",)
    gguf_architecture = "phi3"
    gguf_modules = GGUF_FUSED_MLP
    partial_rotation = pairs_apart = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return window_fields(config, lambda layer: True)

    def names(self, config: ModelConfig) -> Names:
        return {"model.layers.*.self_attn.qkv_proj": fused_qkv(config), **fused_gate_up(config)}

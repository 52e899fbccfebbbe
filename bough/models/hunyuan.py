"""Hunyuan: Llama with a norm on each query and key head, after their rotation."""

from __future__ import annotations

from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names


class HunYuanDense(ModelFamily):
    architectures = ("HunYuanDenseV1ForCausalLM",)
    model_types = ("hunyuan_v1_dense",)
    gguf_architecture = "hunyuan-dense"

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qk_norm": True, "qk_norm_last": True}

    def names(self, config: ModelConfig) -> Names:
        attention = "model.layers.*.self_attn"
        norms = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
        return {f"{attention}.{theirs}": f"{attention}.{ours}" for theirs, ours in norms.items()}

"""DeepSeek V3.2: V3 with sparse attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import IndexConfig
from bough.models.deepseek_v3 import DeepseekV3
from bough.models.fields import Fields


class DeepseekV32(DeepseekV3):
    architectures = ("DeepseekV32ForCausalLM",)
    model_types = ("deepseek_v32",)
    gguf_architecture = None

    def fields(self, config: Fields) -> dict[str, Any]:
        fields = super().fields(config)
        if fields["latent"].query_rank is None:
            raise ModelError(f"{config.where}: sparse attention needs a q_lora_rank.")
        index = IndexConfig(
            heads=config.integer("index_n_heads"),
            head_dim=config.integer("index_head_dim"),
            top=config.integer("index_topk"),
            layers=self.choosing_layers(config),
        )
        if index.head_dim < fields["latent"].rope_dim:
            raise ModelError(f"{config.where}: index_head_dim is smaller than qk_rope_head_dim, which rotates in it.")
        return {**fields, "latent": replace(fields["latent"], index=index)}

    def choosing_layers(self, config: Fields) -> tuple[bool, ...]:
        """Of an `IndexConfig`."""
        return ()

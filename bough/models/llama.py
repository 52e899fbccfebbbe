"""Llama: the model that other families are described against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import Metadata, ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, interleaved


class Llama(ModelFamily):
    architectures = ("LlamaForCausalLM",)
    model_types = ("llama",)
    gguf_architecture = "llama"  # Mistral's too: llama.cpp does not tell them apart
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("mlp_bias")}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp does not tell Mixtral apart either, but by its experts."""
        experts = meta.get(".expert_count", 0)
        if not experts:
            return {}
        used = meta.get(".expert_used_count", None)
        return {"architectures": ["MixtralForCausalLM"], "num_local_experts": experts, "num_experts_per_tok": used}

    def gguf_names(self, config: ModelConfig) -> Names:
        """llama.cpp interleaves the halves of each query and key head, because it rotates neighbours."""
        attention = "model.layers.*.self_attn"
        return {
            **super().gguf_names(config),
            "blk.*.attn_q": interleaved(f"{attention}.q_proj", config.num_heads, config.head_dim),
            "blk.*.attn_k": interleaved(f"{attention}.k_proj", config.num_kv_heads, config.head_dim),
        }

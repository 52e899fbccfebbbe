"""Llama: the model that other families are described against."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.names import GGUF_NAMES, Names, interleaved


class Llama(ModelFamily):
    architectures = ("LlamaForCausalLM",)
    model_types = ("llama",)
    gguf_architecture = "llama"  # Mistral's too: llama.cpp does not tell them apart
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("mlp_bias")}

    def gguf_names(self, config: ModelConfig) -> Names:
        """llama.cpp interleaves the halves of each query and key head, because it rotates neighbours."""
        attention = "model.layers.*.self_attn"
        return {
            **GGUF_NAMES,
            "blk.*.attn_q": interleaved(f"{attention}.q_proj", config.num_heads, config.head_dim),
            "blk.*.attn_k": interleaved(f"{attention}.k_proj", config.num_kv_heads, config.head_dim),
        }

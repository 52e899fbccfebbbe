"""Seed-OSS: Llama with biases on query, key and value."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.models.family import ModelFamily
from bough.models.fields import Fields


class SeedOss(ModelFamily):
    architectures = ("SeedOssForCausalLM",)
    model_types = ("seed_oss",)
    gguf_architecture = "seed_oss"
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"output_bias": config.boolean("attention_out_bias"), "mlp_bias": config.boolean("mlp_bias")}

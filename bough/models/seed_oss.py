"""Seed-OSS: Llama with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from bough.models.family import ModelFamily
from bough.models.fields import Fields


class SeedOss(ModelFamily):
    architectures = ("SeedOssForCausalLM",)
    model_types = ("seed_oss",)
    gguf_architecture = "seed_oss"

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"output_bias": config.boolean("attention_out_bias"), "mlp_bias": config.boolean("mlp_bias")}

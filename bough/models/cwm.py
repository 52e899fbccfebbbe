"""CWM: Llama 3 with windows in three of four layers."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.models.family import ModelFamily, window_fields
from bough.models.fields import Fields


class Cwm(ModelFamily):
    architectures = ("CwmForCausalLM",)
    model_types = ("cwm",)
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128_000,
        "eos_token_id": [128_001, 128_008, 128_009],
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("mlp_bias"), **window_fields(config, lambda layer: layer % 4 != 0)}

"""Granite: Llama with multipliers of embeddings, attention, what each layer adds, and logits."""

from __future__ import annotations

from typing import Any

from bough.models.family import ModelFamily
from bough.models.fields import Fields


class Granite(ModelFamily):
    architectures = ("GraniteForCausalLM",)
    model_types = ("granite",)
    gguf_architecture: str | None = "granite"
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        # Hidden states are kept divided by what multiplies all additions to them. Norms undo that, to the epsilon.
        added = config.number("residual_multiplier", 1.0)
        return {
            "embedding_scale": config.number("embedding_multiplier", 1.0) / added,
            "norm_eps": config.number("rms_norm_eps", 1e-6) / added**2,
            "query_scale": config.number("attention_multiplier", 1.0),
            "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
            "mlp_bias": config.boolean("mlp_bias"),
        }

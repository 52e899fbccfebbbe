"""Arcee and Jais 2: Llama with a plain MLP of squared ReLUs; Jais 2 with layer norms too."""

from __future__ import annotations

from typing import Any

from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields


class Arcee(ModelFamily):
    architectures = ("ArceeForCausalLM",)
    model_types = ("arcee",)
    gguf_architecture = "arcee"
    gguf_interleaved = True
    activations = PLAIN

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp": "plain", "mlp_bias": config.boolean("mlp_bias")}


class Jais2(Arcee):
    architectures = ("Jais2ForCausalLM",)
    model_types = ("jais2",)
    gguf_architecture = "jais2"
    gguf_interleaved = False

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), **layer_norms(config)}

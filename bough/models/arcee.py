"""Arcee and Jais 2: Llama with a plain MLP of squared ReLUs; Jais 2 with layer norms too."""

from __future__ import annotations

from typing import Any, ClassVar

from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields


class Arcee(ModelFamily):
    architectures = ("ArceeForCausalLM",)
    model_types = ("arcee",)
    gguf_architecture = "arcee"
    gguf_interleaved = True
    activations = PLAIN
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp": "plain", "mlp_bias": config.boolean("mlp_bias")}


class Jais2(Arcee):
    architectures = ("Jais2ForCausalLM",)
    model_types = ("jais2",)
    gguf_architecture = "jais2"
    gguf_interleaved = False
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 8192,
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 150_024,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), **layer_norms(config)}

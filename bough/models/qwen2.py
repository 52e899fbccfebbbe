"""Qwen2: Llama with biases on query, key and value; its upper layers may slide."""

from __future__ import annotations

from typing import Any

from bough.core.errors import ModelError
from bough.models.family import ModelFamily, window_fields
from bough.models.fields import Fields


class Qwen2(ModelFamily):
    architectures = ("Qwen2ForCausalLM",)
    model_types = ("qwen2",)
    gguf_architecture = "qwen2"

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qkv_bias": True, "output_bias": False, **qwen_window(config)}


def qwen_window(config: Fields) -> dict[str, Any]:
    """A window holds only where `use_sliding_window` says so."""
    if not config.boolean("use_sliding_window"):
        return {}
    first = config.values.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int):
        raise ModelError(f"{config.where}: max_window_layers must be a whole number, got {first!r}.")
    return window_fields(config, lambda layer: layer >= first)

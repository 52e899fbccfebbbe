"""Qwen3: Llama with a norm on each query and key head; windows are Qwen2's."""

from __future__ import annotations

from typing import Any

from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.qwen2 import qwen_window


class Qwen3(ModelFamily):
    architectures = ("Qwen3ForCausalLM",)
    model_types = ("qwen3",)
    gguf_architecture = "qwen3"

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qk_norm": True, **qwen_window(config)}

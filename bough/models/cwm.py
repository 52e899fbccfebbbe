"""CWM: Llama 3 with windows in three of four layers."""

from __future__ import annotations

from typing import Any

from bough.models.family import ModelFamily, window_fields
from bough.models.fields import Fields


class Cwm(ModelFamily):
    architectures = ("CwmForCausalLM",)
    model_types = ("cwm",)

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("mlp_bias"), **window_fields(config, lambda layer: layer % 4 != 0)}

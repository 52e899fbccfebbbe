"""Qwen3: Llama with a norm on each query and key head; windows are Qwen2's. Qwen3 MoE has a mixture of experts instead
of the MLP, in all layers or in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.models.family import Metadata, ModelFamily, read_moe
from bough.models.fields import Fields
from bough.models.qwen2 import qwen_window, sparse_steps


class Qwen3(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"qk_norm": True, **qwen_window(config)}


class Qwen3Moe(Qwen3):
    def fields(self, config: Fields) -> dict[str, Any]:
        moe = read_moe(config, renormalise=config.boolean("norm_topk_prob"), dense_layers=sparse_steps(config))
        return {**super().fields(config), "moe": moe}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"norm_topk_prob": True}  # which no key says

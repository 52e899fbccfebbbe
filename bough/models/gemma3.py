"""Gemma 3: norms after attention and MLP as well as before; most layers see a window, with its own rotation.

Multimodal checkpoints hold the same text model, one level deeper. Tokens of an image attend to each other both ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import Metadata, ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.gemma import gguf_query_scale
from bough.models.names import GGUF_SANDWICH, NESTED, Names
from bough.models.rope_config import read_local_rope

GGUF_27B_LAYERS = 62


class Gemma3(ModelFamily):
    gguf_modules = GGUF_SANDWICH
    block_kind = "SandwichBlock"
    activation_field = "hidden_activation"

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            "local_rope": read_local_rope(config),
            "qk_norm": True,
            "query_scale": config.number("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": config.optional_number("attn_logit_softcapping"),
            "logit_softcap": config.optional_number("final_logit_softcapping"),
            "embedding_scale": math.sqrt(config.integer("hidden_size")),
            "norm_plus_one": True,
            **window_fields(config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern") != 0),
        }

    def names(self, config: ModelConfig) -> Names:
        return NESTED

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"query_pre_attn_scalar": gguf_query_scale(given, GGUF_27B_LAYERS)}

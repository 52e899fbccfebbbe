"""Gemma and Gemma 2: scaled embeddings, norms that store their weight minus one. Gemma 2 has norms after attention and
MLP as well, caps on scores and logits, and a window in every other layer. VaultGemma is Gemma 2 without those norms.

Gemma 3 has no caps but norms of heads; most layers see a window, with its own rotation. Multimodal checkpoints hold the
same text model, one level deeper. Tokens of an image attend to each other both ways.
"""

from collections.abc import Mapping
from typing import Any

from bough.core.model_config import Activation, ModelConfig
from bough.models.family import GATED, Metadata, ModelFamily, window_fields
from bough.models.fields import Fields
from bough.models.names import NESTED, Names
from bough.models.rope_config import read_local_rope

ACTIVATIONS: dict[str, Activation] = {**GATED, "gelu": "gelu_tanh"}  # first checkpoints name the one, mean the other


class Gemma(ModelFamily):
    activations = ACTIVATIONS

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"embedding_scale": config.integer("hidden_size") ** 0.5, "norm_plus_one": True}


class Gemma2(Gemma):
    block_kind = "SandwichBlock"
    activation_field = "hidden_activation"
    layers_of_27b = 46

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            **super().fields(config),
            "query_scale": config.number("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": config.optional_number("attn_logit_softcapping"),
            "logit_softcap": config.optional_number("final_logit_softcapping"),
            **window_fields(config, lambda layer: layer % 2 == 0),
        }

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """No key says that the models of 27B alone scale queries by hidden size per head."""
        wide = given["num_hidden_layers"] == self.layers_of_27b
        per_head = given["hidden_size"] // given["num_attention_heads"]
        return {"query_pre_attn_scalar": per_head if wide else given["head_dim"]}


class Gemma3(Gemma2):
    activations = GATED
    layers_of_27b = 62

    def fields(self, config: Fields) -> dict[str, Any]:
        windows = window_fields(config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern") != 0)
        return {**super().fields(config), "local_rope": read_local_rope(config), "qk_norm": True, **windows}

    def names(self, config: ModelConfig) -> Names:
        return NESTED

"""Multi-modal models whose language model is that of another family: what `text_config` names, and how it differs.

Their encoders are Transformers' modules (`bough.loader.encoders`).
"""

from collections import ChainMap
from dataclasses import replace
from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, fused_experts, nested
from bough.models.rope_config import with_sections
from bough.models.transformers_family import usual_fields


class Llava(ModelFamily):
    """Its `ModelConfig` is that of the text family, with the encoders beside it."""

    text: str  # the text family, where the checkpoint does not name one of its own

    def read_config(self, config: Fields) -> ModelConfig:
        from bough.models.registry import SIZES, TYPES, find_family  # which lists this module

        named = config.text("model_type", self.text)
        text = named if named in TYPES and named not in self.model_types else self.text
        family, usual = find_family(text), usual_fields(text)
        sizes = {name: usual[name] for name in SIZES if name in usual}
        return family.read_config(Fields(config.where, ChainMap(dict(config.values), dict(family.defaults), sizes)))


class Sectioned(ModelFamily):
    """A family whose heads rotate by time, height and width of a token."""

    alternating: tuple[int, ...] | None = None  # the usual sections, where pairs rotate by time, height, width in turn

    def read_config(self, config: Fields) -> ModelConfig:
        found = super().read_config(config)
        return replace(found, rope=with_sections(config, found.rope, self.alternating))


class Qwen2VL(Sectioned, Llava):
    """Qwen2 that rotates so."""


class Qwen3VL(Qwen2VL):
    """Qwen3 that rotates so; its first layers get features of earlier layers of the encoder, too."""

    alternating = (24, 20, 20)


class Qwen3VLMoe(Qwen3VL):
    """Whose experts stand behind each other; those that Transformers 4 wrote are transposed."""

    def read_config(self, config: Fields) -> ModelConfig:
        return replace(super().read_config(config), architecture=self.architectures[0])

    def names(self, config: ModelConfig) -> Names:
        assert config.moe is not None
        hidden = config.hidden_size
        return nested(fused_experts("model.layers.*.mlp.experts", config.moe, transposed=True, hidden=hidden))


class PaddleOcrVL(Sectioned):
    """Llama that rotates so."""

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("use_bias")}

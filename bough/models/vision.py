"""Multi-modal models whose language model is that of another family: what `text_config` names, and how it differs.

Their encoders are Transformers' modules (`bough.loader.encoders`).
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.rope_config import with_sections
from bough.models.transformers_source import usual_fields


class Llava(ModelFamily):
    """Its `ModelConfig` is that of the text family, with the encoders beside it."""

    text: str  # the text family, where the checkpoint does not name one of its own

    def __init__(self, **stated: Any) -> None:
        super().__init__(**stated)
        self.encoder = self.architectures[0]

    def read_config(self, config: Fields) -> ModelConfig:
        from bough.models.registry import SIZES, find_family, has_type  # which lists this module

        named = config.text("model_type", self.text)
        text = named if has_type(named) and named not in self.model_types else self.text
        family, usual = find_family(text), usual_fields(text)
        sizes = {name: usual[name] for name in SIZES if name in usual}
        return family.read_config(Fields(config.where, ChainMap(dict(config.values), dict(family.defaults), sizes)))


class Qwen2VL(Llava):
    """Qwen2 that rotates by time, height and width."""

    alternating: tuple[int, ...] | None = None  # the usual sections, where pairs rotate by time, height, width in turn

    def read_config(self, config: Fields) -> ModelConfig:
        found = super().read_config(config)
        return replace(found, rope=with_sections(config, found.rope, self.alternating))


class Qwen3VL(Qwen2VL):
    """Qwen3 that rotates so; its first layers get features of earlier layers of the encoder, too."""

    alternating = (24, 20, 20)

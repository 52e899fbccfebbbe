"""Multi-modal models whose language model is that of another family: what `text_config` names, and how it differs.

Their encoders are Transformers' modules (`bough.loader.encoders`).
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.rope_config import with_sections

# Of Transformers' text models, where a checkpoint leaves them out.
TEXT_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


class Llava(ModelFamily):
    """Its `ModelConfig` is that of the text family, with the encoders beside it."""

    architectures = ("LlavaForConditionalGeneration",)
    model_types = ("llava",)
    encoder = "LlavaForConditionalGeneration"
    text = "llama"  # the text family, where the checkpoint does not name one of its own
    defaults: ClassVar[dict[str, Any]] = TEXT_DEFAULTS

    def read_config(self, config: Fields) -> ModelConfig:
        from bough.models.registry import supported_types  # which lists this module

        named = config.text("model_type", self.text)
        families = supported_types()
        family = families[named if named in families and named not in self.model_types else self.text]
        return family.read_config(Fields(config.where, ChainMap(dict(config.values), dict(family.defaults))))


class LlavaNext(Llava):
    architectures = ("LlavaNextForConditionalGeneration",)
    model_types = ("llava_next",)
    encoder = architectures[0]


class LlavaOnevision(Llava):
    architectures = ("LlavaOnevisionForConditionalGeneration",)
    model_types = ("llava_onevision",)
    encoder = architectures[0]
    text = "qwen2"


class InternVL(Llava):
    architectures = ("InternVLForConditionalGeneration",)
    model_types = ("internvl",)
    encoder = architectures[0]
    text = "qwen2"


class Idefics3(Llava):
    architectures = ("Idefics3ForConditionalGeneration",)
    model_types = ("idefics3",)
    encoder = architectures[0]


class SmolVLM(Llava):
    architectures = ("SmolVLMForConditionalGeneration",)
    model_types = ("smolvlm",)
    encoder = architectures[0]


class Qwen2VL(Llava):
    """Qwen2 that rotates by time, height and width."""

    architectures = ("Qwen2VLForConditionalGeneration",)
    model_types = ("qwen2_vl",)
    encoder = architectures[0]
    text = "qwen2"
    alternating: tuple[int, ...] | None = None  # the usual sections, where pairs rotate by time, height, width in turn

    def read_config(self, config: Fields) -> ModelConfig:
        found = super().read_config(config)
        return replace(found, rope=with_sections(config, found.rope, self.alternating))


class Qwen25VL(Qwen2VL):
    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    model_types = ("qwen2_5_vl",)
    encoder = architectures[0]


class Qwen3VL(Qwen2VL):
    """Qwen3 that rotates so; its first layers get features of earlier layers of the encoder, too."""

    architectures = ("Qwen3VLForConditionalGeneration",)
    model_types = ("qwen3_vl",)
    encoder = architectures[0]
    text = "qwen3"
    alternating = (24, 20, 20)

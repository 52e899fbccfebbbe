"""OLMo: Llama with layer norms that have neither weights nor biases. OLMo 2 and 3 have norms after attention and MLP
only, and one over all query heads and all key heads; OLMo 3 has windows in three of four layers, which its rotation for
long contexts spares. OLMoE has those norms of heads and a mixture of experts; FlexOlmo has OLMo 2's norms, too.

EXAONE 4 has such norms, and on each head; layers that see everything beside windows do not rotate. EXAONE MoE has norms
before attention and MLP, and experts chosen as GLM-4.5's are.
"""

from collections.abc import Mapping
from typing import Any

from bough.models.deepseek_v2 import corrected_experts
from bough.models.family import Metadata, ModelFamily, read_moe, rotating_windows, window_fields
from bough.models.fields import Fields
from bough.models.rope_config import read_local_rope


class Olmo2(ModelFamily):
    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp has one name for both."""
        return {"architectures": ["Olmo3ForCausalLM"]} if given["sliding_window"] else {}


class Olmo3(Olmo2):
    def fields(self, config: Fields) -> dict[str, Any]:
        local = read_local_rope(config.renamed({"rope_theta": "rope_local_base_freq"}))
        return {"local_rope": local, **window_fields(config, lambda layer: (layer + 1) % 4 != 0)}


class Olmoe(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"moe": read_moe(config, size="intermediate_size", renormalise=config.boolean("norm_topk_prob"))}


class Exaone4(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        if config.optional_integer("sliding_window") is None:
            return {}
        return rotating_windows(config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern", 4) != 0)


class ExaoneMoe(Exaone4):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), "moe": corrected_experts(config)}

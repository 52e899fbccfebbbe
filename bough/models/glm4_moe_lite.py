"""GLM-4.7 Flash: DeepSeek V3 in another size."""

from __future__ import annotations

from typing import ClassVar

from bough.models.deepseek_v3 import DeepseekV3
from bough.models.glm4_moe import ROUTED


class Glm4MoeLite(DeepseekV3):
    architectures: tuple[str, ...] = ("Glm4MoeLiteForCausalLM",)
    model_types: tuple[str, ...] = ("glm4_moe_lite",)
    gguf_architecture = None
    renamed_fields: ClassVar[dict[str, str]] = ROUTED

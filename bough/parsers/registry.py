"""Formats of calls by the names that SGLang's users know (`--tool-call-parser`). Several names may mean one format."""

from __future__ import annotations

from bough.core.errors import RequestError
from bough.parsers.formats.base import ToolFormat
from bough.parsers.formats.json_arguments import DeepSeek, KimiK2, Mistral
from bough.parsers.formats.json_calls import HERMES, INTERN_S1, Apertus, Cohere, GigaChat, Llama3
from bough.parsers.formats.messages import Harmony, Inkling, Muse
from bough.parsers.formats.nested_values import LFM2, LLAMA4, Gemma, MiniMaxM3
from bough.parsers.formats.tagged_arguments import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DOTS,
    MINIMAX_M2,
    STEP3,
    Glm,
    Hunyuan,
    KimiK3,
    MiniCpm,
    Qwen3Coder,
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "apertus2509": Apertus(),
    "cohere_command4": Cohere(),
    "deepseekv3": DeepSeek(fenced=True),
    "deepseekv31": DeepSeek(fenced=False),
    "deepseekv32": DEEPSEEK_V32,
    "deepseekv4": DEEPSEEK_V4,
    "dots": DOTS,
    "gemma4": Gemma(),
    "gigachat3": GigaChat(),
    "glm": Glm(),
    "glm45": Glm(),
    "glm47": Glm(),
    "gpt-oss": Harmony(),
    "hermes": HERMES,
    "hunyuan": Hunyuan(),
    "inkling": Inkling(),
    "interns1": INTERN_S1,
    "kimi_k2": KimiK2(),
    "kimi_k3": KimiK3(),
    "lfm2": LFM2,
    "llama3": Llama3(),
    "mimo": Qwen3Coder(),
    "minicpm5": MiniCpm(),
    "minimax-m2": MINIMAX_M2,
    "minimax-m3": MiniMaxM3(),
    "mistral": Mistral(),
    "muse": Muse(),
    "poolside_v1": Glm(),
    "pythonic": LLAMA4,
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3_coder": Qwen3Coder(),
    "step3": STEP3,
    "step3p5": Qwen3Coder(),
    "trinity": HERMES,
}


def tool_format(name: str, field: str | None = None) -> ToolFormat:
    """The format by this name; `field` is where a client gave it."""
    if name not in TOOL_FORMATS:
        known = ", ".join(TOOL_FORMATS)
        raise RequestError(f"There is no tool-call parser {name!r}; the known ones are {known}.", field=field)
    return TOOL_FORMATS[name]

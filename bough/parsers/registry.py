"""Formats of calls by the names that SGLang's users know (`--tool-call-parser`). Several names may mean one format."""

from __future__ import annotations

from bough.core.errors import RequestError
from bough.parsers.formats.apertus import Apertus
from bough.parsers.formats.base import ToolFormat
from bough.parsers.formats.cohere import Cohere
from bough.parsers.formats.deepseek import DeepSeek
from bough.parsers.formats.gemma import Gemma
from bough.parsers.formats.gigachat import GigaChat
from bough.parsers.formats.glm import Glm
from bough.parsers.formats.harmony import Harmony
from bough.parsers.formats.hermes import HERMES, TaggedJson
from bough.parsers.formats.hunyuan import Hunyuan
from bough.parsers.formats.inkling import Inkling
from bough.parsers.formats.invoke import DEEPSEEK_V4, DEEPSEEK_V32, DOTS, MINIMAX_M2, STEP3
from bough.parsers.formats.kimi import KimiK2
from bough.parsers.formats.kimi_k3 import KimiK3
from bough.parsers.formats.llama3 import Llama3
from bough.parsers.formats.minicpm import MiniCpm
from bough.parsers.formats.minimax_m3 import MiniMaxM3
from bough.parsers.formats.mistral import Mistral
from bough.parsers.formats.muse import Muse
from bough.parsers.formats.pythonic import LFM2, LLAMA4
from bough.parsers.formats.qwen3_coder import Qwen3Coder

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
    "interns1": TaggedJson("<|action_start|> <|plugin|>", "<|action_end|>", arguments="parameters"),
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

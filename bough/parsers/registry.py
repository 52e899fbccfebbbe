"""Formats of calls and of reasoning by the names that SGLang's users know (`--tool-call-parser`, `--reasoning-parser`).
Several names may mean one format."""

from collections.abc import Mapping
from typing import Any, TypeVar

from bough.core.errors import RequestError
from bough.core.files import table_beside
from bough.parsers.formats import tagged_arguments as tagged
from bough.parsers.formats.base import ToolFormat
from bough.parsers.formats.json_arguments import DeepSeek, KimiK2, Mistral
from bough.parsers.formats.json_calls import APERTUS, COHERE, COHERE_FRAMING, HERMES, INTERN_S1, GigaChat, Llama3
from bough.parsers.formats.messages import Harmony, Inkling, Muse
from bough.parsers.formats.nested_values import LFM2, LLAMA4, Gemma, MiniMaxM3
from bough.parsers.reasoning import ReasoningFormat

T = TypeVar("T")

TOOL_FORMATS: dict[str, ToolFormat] = {
    "apertus2509": APERTUS,
    "cohere_command4": COHERE,
    "deepseekv3": DeepSeek(fenced=True),
    "deepseekv31": DeepSeek(fenced=False),
    "deepseekv32": tagged.DEEPSEEK_V32,
    "deepseekv4": tagged.DEEPSEEK_V4,
    "dots": tagged.DOTS,
    "gemma4": Gemma(),
    "gigachat3": GigaChat(),
    "gpt-oss": Harmony(),
    "hunyuan": tagged.Hunyuan(),
    "inkling": Inkling(),
    "interns1": INTERN_S1,
    "kimi_k2": KimiK2(),
    "kimi_k3": tagged.KimiK3(),
    "lfm2": LFM2,
    "llama3": Llama3(),
    "minicpm5": tagged.MiniCpm(),
    "minimax-m2": tagged.MINIMAX_M2,
    "minimax-m3": MiniMaxM3(),
    "mistral": Mistral(),
    "muse": Muse(),
    "pythonic": LLAMA4,
    "step3": tagged.STEP3,
    **dict.fromkeys(("glm", "glm45", "glm47", "poolside_v1"), tagged.Glm()),
    **dict.fromkeys(("hermes", "qwen", "qwen25", "trinity"), HERMES),
    **dict.fromkeys(("mimo", "qwen3_coder", "step3p5"), tagged.Qwen3Coder()),
}

SHARED: dict[str, dict[str, Any]] = {  # what formats of reasoning have from those of calls, beside the table
    "cohere_command4": {"framing": COHERE_FRAMING},
    "gpt-oss": {"framed": Harmony()},
    "inkling": {"framed": Inkling()},
    "kimi_k3": {"calls": (tagged.KimiK3.TOOLS, tagged.KimiK3.RESPONSE), "framing": tagged.KimiK3.FRAMING},
    "muse": {"framed": Muse()},
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    name: ReasoningFormat(**{**said, "calls": tuple(said.get("calls", ())), **SHARED.get(name, {})})
    for names, said in table_beside(__file__, "reasoning.toml").items()
    for name in names.split()
}


def tool_format(name: str, field: str | None = None) -> ToolFormat:
    return _named(TOOL_FORMATS, "tool-call", name, field)


def reasoning_format(name: str, field: str | None = None) -> ReasoningFormat:
    return _named(REASONING_FORMATS, "reasoning", name, field)


def _named(formats: Mapping[str, T], kind: str, name: str, field: str | None) -> T:
    """The format by this name; `field` is where a client gave it."""
    if name not in formats:
        known = ", ".join(sorted(formats))
        raise RequestError(f"There is no {kind} parser {name!r}; the known ones are {known}.", field=field)
    return formats[name]

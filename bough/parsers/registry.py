"""Formats of calls and of reasoning by the names that SGLang's users know (`--tool-call-parser`, `--reasoning-parser`).
Several names may mean one format."""

from collections.abc import Mapping
from typing import TypeVar

from bough.core.errors import RequestError
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

HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    closing="<|end|><|start|>assistant<|channel|>final<|message|>",
    framed=Harmony(),
)
THINK_OR_CALL = ReasoningFormat(calls=("<tool_call>",))

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "apertus2509": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", calls=("<|tools_prefix|>",)),
    "cohere_command4": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        forced=True,
        calls=("<|START_ACTION|>", "<|START_TEXT|>", "<|START_RESPONSE|>"),
        framing=COHERE_FRAMING,
    ),
    "dots": ReasoningFormat(calls=("<dots_function_call>",)),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "gpt-oss": HARMONY,
    "hunyuan": ReasoningFormat(calls=("<tool_calls>",)),
    "inkling": ReasoningFormat(
        "<|content_thinking|>",
        "<|content_text|>",
        closing="<|end_message|><|message_model|><|content_text|>",
        framed=Inkling(),
    ),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(calls=("<|tool_calls_section_begin|>",)),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        calls=(tagged.KimiK3.TOOLS, tagged.KimiK3.RESPONSE),
        framing=tagged.KimiK3.FRAMING,
    ),
    "minimax": ReasoningFormat(forced=True, calls=("<minimax:tool_call>",)),
    "minimax-append-think": ReasoningFormat(shown=True),
    "minimax-m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "muse": ReasoningFormat(
        "to=self<|message|>",
        "to=user<|message|>",
        closing="<|eom|><|start|>assistant to=user<|message|>",
        framed=Muse(),
    ),
    "qwen3-thinking": ReasoningFormat(forced=True, calls=("<tool_call>",)),
    **dict.fromkeys(("deepseek-r1", "step3", "step3p5"), ReasoningFormat(forced=True)),
    **dict.fromkeys(("deepseek-v3", "deepseek-v4"), ReasoningFormat()),
    **dict.fromkeys(("glm45", "interns1", "mimo", "nemotron_3", "poolside_v1", "qwen3"), THINK_OR_CALL),
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

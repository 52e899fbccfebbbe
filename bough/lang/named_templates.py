"""Chat formats by name, for servers that do not tell their template, and for APIs, where it is only for reading.

Each is what stands before and after the messages of a role. Facts of the models, not code: add one by adding a line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bough.core.errors import SettingsError

Around = tuple[str, str]


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """What stands around the messages of each role; a first message that is not the system's may get a default one."""

    around: Mapping[str, Around]
    stop: tuple[str, ...] = ()
    default_system: str | None = None

    def opening(self, roles: tuple[str, ...], *, generated: bool) -> str:
        before, _ = self.around[roles[-1]]
        if len(roles) == 1 and roles[0] != "system" and self.default_system is not None:
            left, right = self.around["system"]
            return f"{left}{self.default_system}{right}{before}"
        return before

    def closing(self, roles: tuple[str, ...]) -> str:
        return self.around[roles[-1]][1]


def _marks(before: str, after: str) -> dict[str, Around]:
    """The same for all roles, whose name stands in it."""
    return {role: (before.format(role), after) for role in ("system", "user", "assistant")}


FORMATS: dict[str, NamedFormat] = {
    "default": NamedFormat({"system": ("SYSTEM:", "\n"), "user": ("USER:", "\n"), "assistant": ("ASSISTANT:", "\n")}),
    "chatml": NamedFormat(_marks("<|im_start|>{}\n", "<|im_end|>\n"), ("<|im_end|>",), "You are a helpful assistant."),
    "qwen": NamedFormat(_marks("<|im_start|>{}\n", "<|im_end|>\n"), ("<|im_end|>",), "You are a helpful assistant."),
    "llama-2-chat": NamedFormat(
        {
            "system": ("<<SYS>>\n", "\n<</SYS>>\n\n"),
            "user": ("[INST] ", " [/INST]"),
            "assistant": ("", " </s><s>"),
        }
    ),
    "llama-3-instruct": NamedFormat(
        _marks("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"), ("<|eot_id|>",)
    ),
    "gemma-it": NamedFormat(
        {
            "system": ("", ""),
            "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
        }
    ),
    "mistral": NamedFormat(
        {
            "system": ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"),
            "user": ("[INST] ", " [/INST]"),
            "assistant": ("", "</s>"),
        }
    ),
    "deepseek-v3": NamedFormat(
        {
            "system": ("", ""),
            "user": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        },
        ("<｜end▁of▁sentence｜>",),
    ),
}

# Which name a model's path suggests; the first that matches.
PATHS = (
    (r"llama-?2.*chat|codellama.*instruct", "llama-2-chat"),
    (r"llama-?3.*instruct", "llama-3-instruct"),
    (r"deepseek-?(v3|r1)(?!.*(base|distill))", "deepseek-v3"),
    (r"qwen.*(chat|instruct)|qwen-?3", "qwen"),
    (r"gemma.*it", "gemma-it"),
    (r"mistral|mixtral|pixtral", "mistral"),
    (r"smollm|chatml|yi-.*chat|hermes", "chatml"),
)


def format_by_name(name: str) -> NamedFormat:
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"Unknown chat template {name!r}.{hint} Known: {', '.join(FORMATS)}.")
    return FORMATS[name]


def format_by_path(path: str) -> NamedFormat:
    return FORMATS[next((name for pattern, name in PATHS if re.search(pattern, path, re.IGNORECASE)), "default")]

"""What Ollama's clients get back, as data. A stream's lines are the same objects; all but the last lack the figures.

Durations are in nanoseconds. Fields that are `UNSET` do not appear at all.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class AnswerObject(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or what is new in it. `load_duration` is the time in the queue: the model is always loaded."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "abort", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    timings: Any = UNSET
    warnings: Any = UNSET


class GenerateAnswer(AnswerObject, frozen=True, kw_only=True):
    """The answer of /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatAnswer(AnswerObject, frozen=True, kw_only=True):
    """The answer of /api/chat."""

    message: ChatMessage


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the server does not know is empty."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelList(msgspec.Struct, frozen=True):
    """The answer of /api/tags."""

    models: list[ModelEntry]


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /api/show."""

    modelfile: str
    parameters: str = ""
    template: str = ""
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str

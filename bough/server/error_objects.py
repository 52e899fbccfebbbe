"""The JSON of errors in each protocol, for the OpenAPI page; `errors` writes it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bough.server.errors import Shape, anthropic_shape, native_shape, ollama_shape, openai_shape


class NativeErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong, in one sentence, and whether it helps to try again."""

    message: str
    type: str
    code: int
    retryable: bool
    param: str | msgspec.UnsetType | None = msgspec.UNSET


class NativeError(msgspec.Struct):
    """An error of the native routes."""

    error: NativeErrorBody


class OpenAIErrorBody(msgspec.Struct):
    """What went wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    """An error of OpenAI's routes."""

    error: OpenAIErrorBody


class AnthropicErrorBody(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """An error of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorBody


class OllamaError(msgspec.Struct):
    """An error of Ollama's routes."""

    error: str


ERROR_TYPES: dict[Shape, Any] = {
    native_shape: NativeError,
    openai_shape: OpenAIError,
    anthropic_shape: AnthropicError,
    ollama_shape: OllamaError,
}

"""What Anthropic's clients get back, as data: the message, and the events of which its stream is made."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost. As Anthropic counts, `input_tokens` are those that did not come out of the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # everything is cached, at no cost
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # nobody checks it here


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/messages; in a stream, how it begins."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage
    timings: Any = UNSET


class TokensCount(msgspec.Struct, frozen=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


# Events ---------------------------------------------------------------------------------------------------------------


class MessageStart(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["message_start"] = "message_start"
    message: Message


class ContentBlockStart(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["content_block_start"] = "content_block_start"
    index: int = 0
    content_block: Block


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["ping"] = "ping"


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int = 0
    delta: Delta


class ContentBlockStop(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int = 0


class StopDelta(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """How the message ended, and what all of it cost."""

    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: Usage
    timings: Any = UNSET


class MessageStop(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["message_stop"] = "message_stop"

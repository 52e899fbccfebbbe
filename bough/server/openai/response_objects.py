"""What clients of /v1/responses get back: the response, and the events of its stream, as data.

The order of fields is the order in the JSON; `response_events` prepares the one event that comes with every token.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from bough.server.openai.objects import TokenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] | None = None
    token_ids: list[int] | UnsetType = UNSET


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response, from its creation to its end."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    model: str
    output: list[OutputMessage] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    store: bool
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    parallel_tool_calls: bool = True
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = []
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None
    meta_info: dict[str, Any] | UnsetType = UNSET
    timings: dict[str, Any] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


# Events of a stream ---------------------------------------------------------------------------------------------------


class LifeEvent(msgspec.Struct, frozen=True):
    """response.created, .in_progress, .completed, .incomplete, .failed"""

    type: str
    response: ResponseObject
    sequence_number: int


class ItemEvent(msgspec.Struct, frozen=True):
    """response.output_item.added, .done"""

    type: str
    output_index: int
    item: OutputMessage
    sequence_number: int


class PartEvent(msgspec.Struct, frozen=True):
    """response.content_part.added, .done"""

    type: str
    item_id: str
    output_index: int
    content_index: int
    part: OutputText
    sequence_number: int


class TextDeltaEvent(msgspec.Struct, frozen=True):
    """response.output_text.delta"""

    type: str
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]
    sequence_number: int


class TextDoneEvent(msgspec.Struct, frozen=True):
    """response.output_text.done"""

    type: str
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]
    sequence_number: int


Event = LifeEvent | ItemEvent | PartEvent | TextDeltaEvent | TextDoneEvent

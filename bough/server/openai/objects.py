"""What OpenAI's clients get back from completions and chats, as data; the chunks of streams are made of the same parts.

Fields that are `UNSET` do not appear at all: they are SGLang's extras, there for those who asked. The order of fields
is the order in the JSON, on which `PreparedChunk` relies.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishWord = Literal["stop", "length", "tool_calls", "abort"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """What a request cost. Samples of one prompt share its tokens, so those count once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's. `rank` is 1 for the likeliest; null for a prompt's token that is not among those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


# By position and token id; nothing stands before the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    finish_reason: FinishWord | None = None
    matched_stop: int | str | UnsetType | None = UNSET
    meta_info: dict[str, Any] | UnsetType = UNSET
    hidden_states: list[float] | UnsetType = UNSET  # of the last token
    sgl_ext: dict[str, Any] | UnsetType = UNSET  # `routed_experts`


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the choices, of a whole answer and of each chunk."""

    id: str
    created: int
    model: str
    timings: Any = UNSET
    warnings: list[str] | UnsetType = UNSET
    sglext: dict[str, dict[str, int | str | None]] | UnsetType = UNSET


# Completions ----------------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry per token. The first token of an echoed prompt has no logprob: nothing stands before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Choice, frozen=True, kw_only=True):
    """One answer, or what is new in it."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Answer, frozen=True, kw_only=True):
    """The answer of /v1/completions, and each chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# Chats ----------------------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChatChoice(Choice, frozen=True, kw_only=True):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new in a call; its id, type and name come with the first one."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new in a message; `role` comes with the first one. Thinking and calls are null where there are none, so
    that the objects of SDKs have them."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice, frozen=True, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Answer, frozen=True, kw_only=True):
    """Each chunk of a chat's stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# Models ---------------------------------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "bough"
    root: str
    parent: str | None = None  # of an adapter: the model that it changes
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]

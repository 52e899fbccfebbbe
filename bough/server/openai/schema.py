"""What OpenAI's clients may send: every field of the requests, OpenAI's own and SGLang's extras, in one place.

The types are the first check; keeping to the ranges and refusing unbuilt features is `limits`' matter. `None` is "not
given" throughout, because that is what a JSON `null` means here. Fields that only inform somebody else's billing,
caching or moderation (`user`, `metadata`, `service_tier`, ...) are taken and change nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from bough.core.sampling_params import INT32_MAX, INT64_MAX, MAX_BIAS, MAX_LOGPROBS, MAX_TEMPERATURE
from bough.server.grammars import GrammarFields
from bough.server.limits import TOP_K, above, between
from bough.server.resuming import Resume

MAX_CHOICES = 1024

Count = Annotated[int | None, between(1, MAX_CHOICES)]
TokenCount = Annotated[int | None, between(0, INT32_MAX)]
TopLogprobs = Annotated[int | None, between(0, MAX_LOGPROBS)]  # OpenAI itself stops at 20
Messages = Annotated[
    list[dict[str, Any]] | None,
    msgspec.Meta(
        description="The conversation. A content is a string or a list of text parts.",
        examples=[[{"role": "user", "content": "Hello"}]],
    ),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats`: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(GrammarFields, kw_only=True):
    """How tokens are chosen; the same in all three APIs."""

    temperature: Annotated[float | None, between(0, MAX_TEMPERATURE)] = None
    top_p: Annotated[float | None, above(0, 1)] = None
    top_k: Annotated[int | None, TOP_K] = None
    min_p: Annotated[float | None, between(0, 1)] = None
    min_tokens: TokenCount = None
    frequency_penalty: Annotated[float | None, between(-2, 2)] = None
    presence_penalty: Annotated[float | None, between(-2, 2)] = None
    repetition_penalty: Annotated[float | None, above(0, 2)] = None
    seed: Annotated[int | None, between(-INT64_MAX - 1, INT64_MAX)] = None
    logit_bias: dict[str, Annotated[float, between(-MAX_BIAS, MAX_BIAS)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: int | list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    custom_params: dict[str, Any] | None = None


class EngineFields(SamplingFields, kw_only=True):
    """What SGLang adds around a request: its id, its place in queue and cache, and what its answer shows besides."""

    rid: str | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    custom_logit_processor: str | None = None
    return_token_ids: bool | None = None
    return_meta_info: bool | None = None
    return_timings: bool | None = None


class UnbuiltFields(EngineFields, kw_only=True):
    """Fields whose feature this engine does not have; `limits` refuses them where they ask for something."""

    lora_path: str | list[str | None] | None = None
    session_id: str | None = None
    session_params: dict[str, Any] | None = None
    return_hidden_states: bool | None = None
    return_cached_tokens_details: bool | None = None


class CompletionRequest(UnbuiltFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    resume: Resume | None = None
    model: str | None = None
    max_tokens: TokenCount = None
    n: Count = None
    best_of: Count = None
    echo: bool | None = None
    logprobs: TopLogprobs = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    user: str | None = None


class ChatRequest(UnbuiltFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages = None
    input_ids: list[int] | None = None  # the prompt itself, instead of the messages through the template
    resume: Resume | None = None
    model: str | None = None
    max_tokens: TokenCount = None
    max_completion_tokens: TokenCount = None
    n: Count = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # a variable of the template
    separate_reasoning: bool | None = None  # without a reasoning parser there is nothing to separate
    stream_reasoning: bool | None = None
    max_thinking_tokens: TokenCount = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None
    web_search_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    verbosity: str | None = None


class ResponsesRequest(UnbuiltFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    # Fields of the other two APIs, which this one cannot serve.
    input_ids: list[int] | None = None
    n: int | None = None
    resume: dict[str, Any] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int | None, between(1, INT32_MAX)] = None
    top_logprobs: TopLogprobs = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_thinking_tokens: TokenCount = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    prompt: dict[str, Any] | None = None
    conversation: str | dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    access_programs: dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

"""What OpenAI's clients may send, and what the engine makes of it: every field (OpenAI's own and SGLang's extras),
the features that are refused, tools, sampling parameters and options.

`None` is "not given" throughout, because that is what a JSON `null` means here. Fields that only inform somebody else's
billing, caching or moderation (`user`, `metadata`, `service_tier`, ...) are accepted and change nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from bough.client.inputs import READ_FIELDS
from bough.core import sampling_params as sampling
from bough.core.errors import RequestError
from bough.server import bodies
from bough.server.errors import set_field_names
from bough.server.grammars import GrammarFields, grammar_names, grammar_of
from bough.server.parsing import MAX_TOOLS, NO_TOOLS, Tool, ToolUse, any_of, one_of, read_functions
from bough.server.streaming import Resume

MAX_CHOICES = 1024

Count = Annotated[int | None, bodies.between(1, MAX_CHOICES)]
TokenCount = Annotated[int | None, bodies.between(0, sampling.INT32_MAX)]
TopLogprobs = Annotated[int | None, bodies.between(0, sampling.MAX_LOGPROBS)]  # OpenAI itself stops at 20
Messages = Annotated[
    list[dict[str, Any]] | None,
    msgspec.Meta(
        description="The conversation. A content is a string or a list of parts: text, images, videos, recordings.",
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

    temperature: Annotated[float | None, bodies.between(0, sampling.MAX_TEMPERATURE)] = None
    top_p: Annotated[float | None, bodies.above(0, 1)] = None
    top_k: Annotated[int | None, bodies.TOKENS_OR_MOST] = None
    min_p: Annotated[float | None, bodies.between(0, 1)] = None
    min_tokens: TokenCount = None
    frequency_penalty: Annotated[float | None, bodies.between(-2, 2)] = None
    presence_penalty: Annotated[float | None, bodies.between(-2, 2)] = None
    repetition_penalty: Annotated[float | None, bodies.above(0, 2)] = None
    seed: Annotated[int | None, bodies.between(-sampling.INT64_MAX - 1, sampling.INT64_MAX)] = None
    logit_bias: dict[str, Annotated[float, bodies.between(-sampling.MAX_BIAS, sampling.MAX_BIAS)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: int | list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None  # vLLM's name of no_stop_trim
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: Annotated[int | None, bodies.TOKENS_OR_MOST] = None  # the last ones are kept
    custom_params: dict[str, Any] | None = None


if TYPE_CHECKING:
    OtherOpenAIFields = SamplingFields
else:
    OtherOpenAIFields = bodies.fields_without_effect("OtherOpenAIFields", SamplingFields)


class EngineFields(OtherOpenAIFields, kw_only=True):
    """What all three APIs have around the prompt, and what SGLang adds: the request's id, its place in queue and cache,
    and what its answer shows besides."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    rid: str | None = None
    session_id: str | None = None  # a label of the client's
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    custom_logit_processor: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    return_token_ids: bool | None = None
    return_meta_info: bool | None = None
    return_timings: bool | None = None
    prompt_logprobs: TopLogprobs = None
    lora_path: str | list[str | None] | None = None  # the name of an adapter; one for each prompt
    session_params: dict[str, Any] | None = None
    return_hidden_states: bool | None = None
    return_cached_tokens_details: bool | None = None
    return_routed_experts: bool | None = None
    # Features that this engine does not have: refused where they ask for something (more in `OtherOpenAIFields`).
    length_penalty: Annotated[float | None, bodies.unsupported(1.0, None)] = None
    include_reasoning: Annotated[bool | None, bodies.unsupported(True, None)] = None
    thinking_token_budget: Annotated[int | None, bodies.unsupported(None)] = None
    add_special_tokens: Annotated[bool | None, bodies.unsupported(True, None)] = None
    disagg_prefill_dp_rank: Annotated[int | None, bodies.unsupported(None)] = None


class CompletionRequest(EngineFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    resume: Resume | None = None
    max_tokens: TokenCount = None
    n: Count = None
    best_of: Count = None
    echo: bool | None = None
    logprobs: TopLogprobs = None


class ConversationFields(EngineFields, kw_only=True):
    """What chats and responses share."""

    top_logprobs: TopLogprobs = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_thinking_tokens: TokenCount = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class ChatRequest(ConversationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages = None
    input_ids: list[int] | None = None  # the prompt itself, instead of the messages through the template
    resume: Resume | None = None
    max_tokens: TokenCount = None
    max_completion_tokens: TokenCount = None
    n: Count = None
    logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None  # a variable of the template
    separate_reasoning: bool | None = None  # without a reasoning parser there is nothing to separate
    stream_reasoning: bool | None = None
    function_call: Annotated[str | dict[str, Any] | None, bodies.unsupported("auto", "none")] = None
    modalities: Annotated[list[str] | None, bodies.unsupported(["text"])] = None
    web_search_options: Annotated[dict[str, Any] | None, bodies.unsupported(None)] = None


if TYPE_CHECKING:
    OtherResponseFields = ConversationFields
else:
    OtherResponseFields = bodies.fields_without_effect("OtherResponseFields", ConversationFields)


class ResponsesRequest(OtherResponseFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    n: Annotated[int | None, bodies.unsupported(1, None)] = None
    prompt_logprobs: Annotated[int | None, bodies.unsupported(None)] = None  # 0 asks for those of the prompt itself
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int | None, bodies.between(1, sampling.INT32_MAX)] = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Annotated[str | None, bodies.unsupported("disabled")] = None
    max_tool_calls: int | None = None


def check_request(request: EngineFields) -> None:
    bodies.check_ranges(request)
    for name in ("stop", "stop_regex", "stop_token_ids"):
        bodies.check_stops(getattr(request, name), name)
    bodies.refuse_unsupported(request)
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs come with whole answers only; leave stream out.", field="prompt_logprobs")


CHOICES = "none, auto, required, allowed_tools, or a function by name"

MODES = ("auto", "required")


def tools_of(request: ConversationFields, inside: str | None = "function") -> ToolUse:
    tools = read_functions(request.tools, nested=inside is not None)
    return choose_tools(tools, request.tool_choice, request.parallel_tool_calls, inside)


def choose_tools(
    tools: Sequence[Tool], choice: Any, parallel: bool | None = None, inside: str | None = "function"
) -> ToolUse:
    """`inside` is the field of a choice by name that holds the name."""
    if choice is None or choice == "auto":
        return any_of(tools, single=parallel is False)
    if choice == "none":
        any_of(tools)  # whether they make sense
        return NO_TOOLS
    if choice == "required":
        return any_of(tools, must=True, single=parallel is False)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _choose_among(tools, choice, parallel, inside)
    named = choice if inside is None or not isinstance(choice, Mapping) else choice.get(inside)
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function" and isinstance(named, Mapping):
        return one_of(tools, named.get("name"))
    raise RequestError(f"tool_choice must be {CHOICES}; got {choice!r}.", field="tool_choice")


def _choose_among(
    tools: Sequence[Tool], choice: Mapping[str, Any], parallel: bool | None, inside: str | None
) -> ToolUse:
    """`allowed_tools`: a choice among some of the tools."""
    said = choice if inside is None else choice.get("allowed_tools")
    named = said.get("tools") if isinstance(said, Mapping) else None
    if not isinstance(said, Mapping) or not isinstance(named, list) or said.get("mode", "auto") not in MODES:
        text = "tool_choice of type allowed_tools needs a mode, auto or required, and a list of tools."
        raise RequestError(text, field="tool_choice")
    sampling.require_few(named, "tool_choice", MAX_TOOLS)
    functions = [each if inside is None or not isinstance(each, Mapping) else each.get(inside) for each in named]
    names = [each.get("name") if isinstance(each, Mapping) else None for each in functions]
    for name in names:
        one_of(tools, name)  # which says what is wrong with it
    allowed = [tool for tool in tools if tool.name in names]
    return any_of(allowed, must=said.get("mode") == "required", single=parallel is False)


OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs_num": "top_logprobs",
    "input_ids": "prompt",
}
SAME_NAMES = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name in sampling.SamplingParams.__struct_fields__ and name not in sampling.GRAMMAR_FIELDS
)


OPTIONS = tuple(name for name in EngineFields.__struct_fields__ if name in READ_FIELDS)


@dataclass(frozen=True, slots=True)
class Identity:
    """What is the same in an answer and in all chunks of it."""

    id: str
    created: int
    model: str

    @classmethod
    def make(cls, prefix: str, rid: str | None, model: str, resume: Resume | None = None) -> Identity:
        """The client's own id where it gave one; the engine knows the request by the same. A resumed answer keeps the
        id and time of its first chunks."""
        given = resume or Resume(output_ids=[])
        created = int(time.time()) if given.created is None else given.created
        return cls(given.id or rid or f"{prefix}{uuid.uuid4().hex}", created, model)


def sampling_of(request: SamplingFields, *, max_new_tokens: int, samples: int = 1) -> dict[str, Any]:
    """SGLang's sampling parameters; what was not given stays None and takes the model's default."""
    return {
        **{name: getattr(request, name) for name in SAME_NAMES},
        **grammar_of(request),
        "no_stop_trim": request.include_stop_str_in_output if request.no_stop_trim is None else request.no_stop_trim,
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": request.min_tokens,
        "sampling_seed": request.seed,
        "n": samples,
    }


def logprobs_of(
    request: EngineFields, top: int | None, *, of_output: bool = False, of_prompt: bool = False
) -> dict[str, Any]:
    """`top` are the likeliest tokens that the answer shows beside each of its own; None: it shows no logprobs."""
    asked = request.prompt_logprobs
    return {
        "return_logprob": of_output or top is not None or asked is not None,
        "logprob_start_len": 0 if of_prompt or asked is not None else -1,
        "top_logprobs_num": max(top or 0, asked or 0),
    }


def options_of(request: EngineFields, identity: Identity) -> dict[str, Any]:
    return {**bodies.given_fields(request, OPTIONS), "model": request.model, "rid": identity.id}


def use_openai_names(request: SamplingFields, **names: str) -> None:
    """Errors and warnings name OpenAI's fields from here on; `names` are particular to one API."""
    allowed = {"logit_bias": "allowed_token_ids"} if request.allowed_token_ids and not request.logit_bias else {}
    set_field_names({**OPENAI_NAMES, **allowed, **grammar_names(request), **names})

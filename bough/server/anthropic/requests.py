"""What Anthropic's clients may send, and what the engine makes of it: the conversation in the form that templates know
(blocks of calls, results and thinking become fields and messages of OpenAI's form), the tools, and sampling.

`None` is "not given" throughout, as a JSON `null` is. Fields that only concern somebody else's billing, caching or
tracing (`metadata`, `cache_control`, `service_tier`, ...) are accepted and change nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from bough.core.errors import RequestError
from bough.core.sampling_params import INT32_MAX, require_utf8
from bough.core.settings import Settings
from bough.server import bodies, messages, parsing
from bough.server.parsing import NO_TOOLS, Tool, ToolUse, any_of, one_of, read_function, unknown_thinking
from bough.server.streaming import Resume, read_resumption

Messages = Annotated[
    list[dict[str, Any]],
    msgspec.Meta(
        description="The conversation. A content is a string or a list of blocks of text and images.",
        examples=[[{"role": "user", "content": "Hello"}]],
    ),
]


if TYPE_CHECKING:
    OtherMessageFields = msgspec.Struct
else:
    OtherMessageFields = bodies.fields_without_effect("OtherMessageFields")


class CountTokensRequest(OtherMessageFields, kw_only=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    messages: Messages
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, bodies.between(0, INT32_MAX)]
    temperature: Annotated[float | None, bodies.between(0, 1)] = None
    top_p: Annotated[float | None, bodies.above(0, 1)] = None
    top_k: Annotated[int | None, bodies.between(0, INT32_MAX)] = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    return_timings: bool | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    resume: Resume | None = None


ROLES = ("user", "assistant", "system")


def read_conversation(request: CountTokensRequest) -> list[messages.Message]:
    """The system prompt and the turns. Turns of the same role in a row are one, as Anthropic says."""
    opening = [{"role": "system", "content": messages.read_content(request.system, "system")}] if request.system else []
    messages.check_size(request.messages, "messages", spoken=True)
    turns = [*opening, *_Reader().all(request.messages)]
    return messages.join_runs(turns, lambda run, turn: run[0]["role"] == turn["role"] != "tool", "\n")


class _Reader:
    """Remembers the names of calls, because their results have only the ids."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def all(self, given: list[dict[str, Any]]) -> list[messages.Message]:
        return [turn for i, message in enumerate(given) for turn in self._message(message, f"messages[{i}]")]

    def _message(self, message: Mapping[str, Any], where: str) -> list[messages.Message]:
        content = message.get("content")
        if not isinstance(content, list):
            read = messages.read_message(message, where, ROLES)
            return [{"role": read["role"], "content": read["content"]}]
        role = messages.read_message({**message, "content": ""}, where, ROLES)["role"]
        parts: list[str | messages.Message] = []
        calls: list[messages.Message] = []
        thoughts: list[str] = []
        results: list[messages.Message] = []
        for i, block in enumerate(content):
            place = f"{where}.content[{i}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "tool_use" and role == "assistant":
                calls.append(self._call(block, place))
            elif kind == "tool_result" and role == "user":
                results.append(self._result(block, place))
            elif kind == "thinking" and role == "assistant":
                thoughts.append(str(block.get("thinking") or ""))
            elif kind != "redacted_thinking":
                parts.append(_read_block(block, place, role))
        turn: messages.Message = {"role": role, "content": messages.as_content(parts)}
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        return [*results, turn] if parts or calls or thoughts or not results else results

    def _call(self, block: Mapping[str, Any], where: str) -> messages.Message:
        id, name, given = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(id, str) or not isinstance(name, str) or not isinstance(given, Mapping):
            raise RequestError(f"{where} must have an id, a name and an input that is an object.", field=where)
        self._names[id] = name
        return {"id": id, "type": "function", "function": {"name": name, "arguments": dict(given)}}

    def _result(self, block: Mapping[str, Any], where: str) -> messages.Message:
        id = block.get("tool_use_id")
        if not isinstance(id, str):
            raise RequestError(f"{where}.tool_use_id must be the id of a call.", field=where)
        content: messages.Content
        if isinstance(given := block.get("content"), list):
            content = messages.as_content([_read_block(each, f"{where}.content[{i}]") for i, each in enumerate(given)])
        else:
            content = messages.read_content(given, f"{where}.content", optional=True)
        return {"role": "tool", "tool_call_id": id, "name": self._names.get(id, ""), "content": content}


def _read_block(block: Any, where: str, role: str = "user") -> str | messages.Message:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "image" and role == "user":
        return _read_image(block.get("source"), where)
    if kind == "document":
        raise RequestError(f"{where}: documents are not read by this server; send their text or images.", field=where)
    text = messages.read_part(block, where)
    require_utf8(str(text), where)
    return text


def _read_image(source: Any, where: str) -> messages.Message:
    given = source if isinstance(source, Mapping) else {}
    if given.get("type") == "base64":
        return messages.media_part("image", messages.decode_base64(given.get("data"), f"{where}.source.data"), where)
    if given.get("type") == "url" and isinstance(url := given.get("url"), str) and url:
        require_utf8(url, f"{where}.source.url")
        return messages.media_part("image", url, where)
    text = f'{where}.source must be of type "base64", with data, or of type "url", with a url.'
    raise RequestError(text, field=where)


THINKING = ("enabled", "adaptive", "disabled")
# The engine's names of fields, and the client's.
NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences", "input_ids": "messages"}


def check_request(request: CountTokensRequest) -> None:
    bodies.check_ranges(request)
    bodies.refuse_unsupported(request)
    output_schema(request)


def names_of(request: CountTokensRequest) -> dict[str, str]:
    _, field = output_schema(request)
    return {**NAMES, "json_schema": field}


def output_schema(request: CountTokensRequest) -> tuple[Any, str]:
    """The schema that the answer must match, if there is one, and the field that says so. It is strict, as
    Anthropic's own is."""
    said = {"output_config.format": (request.output_config or {}).get("format"), "output_format": request.output_format}
    given = {field: value for field, value in said.items() if value}
    if not given:
        return None, "output_config.format"
    if len(given) > 1:
        text = f"{' and '.join(given)} each say what the answer must match; give one."
        raise RequestError(text, field="output_format")
    ((field, form),) = given.items()
    if not isinstance(form, Mapping) or form.get("type") != "json_schema" or form.get("schema") in (None, ""):
        raise RequestError(f'{field} must have the type "json_schema" and a schema.', field=field)
    return form["schema"], field


def read_request(request: MessagesRequest, rid: str) -> dict[str, Any]:
    bodies.check_stops(request.stop_sequences, "stop_sequences")
    schema, _ = output_schema(request)
    return {
        "rid": rid,
        **bodies.given_fields(request, ("bootstrap_host", "bootstrap_port", "bootstrap_room")),
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or None,  # none at all is Anthropic's way to leave it off
            "stop": request.stop_sequences,
            **({} if schema is None else {"json_schema": schema}),
        },
        **read_resumption(request.resume, request.stream),
    }


def template_variables(request: CountTokensRequest) -> dict[str, Any]:
    effort = (request.output_config or {}).get("effort")
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if request.thinking:
        variables["enable_thinking"] = request.thinking.get("type") != "disabled"
    return variables


def check_thinking(thinking: Mapping[str, Any] | None, settings: Settings) -> None:
    """Thinking needs a server with a reasoning parser."""
    if not thinking:
        return
    kind = thinking.get("type")
    if kind not in THINKING:
        raise RequestError(f"thinking.type must be one of {', '.join(THINKING)}; got {kind!r}.", field="thinking.type")
    if kind != "disabled" and settings.model.reasoning_parser is None:
        raise unknown_thinking("thinking")


def thinking_budget(thinking: Mapping[str, Any] | None) -> int | None:
    """How many tokens the model may think; None: as many as it likes."""
    budget = (thinking or {}).get("budget_tokens")
    if budget is None or (thinking or {}).get("type") == "disabled":
        return None
    if not isinstance(budget, int) or isinstance(budget, bool) or not 1 <= budget <= INT32_MAX:
        text = f"thinking.budget_tokens must be between 1 and {INT32_MAX}, got {budget!r}."
        raise RequestError(text, field="thinking.budget_tokens")
    return budget


def read_tools(request: CountTokensRequest) -> ToolUse:
    tools: list[Tool] = []
    for i, tool in enumerate(parsing.few(request.tools)):
        if tool.get("type", "custom") not in (None, "custom"):
            text = f"tools[{i}]: tools of type {tool['type']!r} are not supported by this server; declare your own."
            raise RequestError(text, field="tools")
        eager = tool.get("eager_input_streaming") is True  # arguments are shown while they are written, valid or not
        tools.append(replace(read_function(tool, i, schema_field="input_schema"), eager=eager))
    parsing.check_tools(tools, "input_schema")
    choice = request.tool_choice or {"type": "auto"}
    single = bool(choice.get("disable_parallel_tool_use"))
    match choice.get("type"):
        case "auto":
            return any_of(tools, single=single)
        case "any":
            return any_of(tools, must=True, single=single)
        case "tool":
            return one_of(tools, choice.get("name"))
        case "none":
            return NO_TOOLS
    raise RequestError("tool_choice.type must be auto, any, tool or none.", field="tool_choice")

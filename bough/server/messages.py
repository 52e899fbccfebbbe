"""Checks the messages of conversations, and brings them into the form that templates expect.

Templates expect arguments of calls as objects, where OpenAI's protocol has JSON text. A content becomes one string or,
with media in it, a list of `{"type": "text", "text": ...}` and `{"type": "image", "media": MediaSource, "where": ...}`,
in the client's order; `where` names the part for errors. Everything else in a message is the template's to read.
"""

import base64
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.core.media import MediaKind, MediaSource
from bough.core.sampling_params import require_utf8
from bough.server.errors import add_field_names
from bough.tokenizer.chat_template import text_part

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# by the type of a part, the field that holds its text
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MEDIA_PARTS: dict[str, MediaKind] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
MEDIA_ROLES = ("user", "tool")
DETAILS = (None, "low", "high", "auto")
MAX_VALUES = 1 << 17  # of a conversation: reading them blocks the event loop for some tenths of a second
MAX_ARGUMENTS = 1 << 20  # characters of a call's arguments that are read as JSON; longer ones stay text

Message = dict[str, Any]
Content = str | list[dict[str, Any]]


def read_messages(
    given: Sequence[Mapping[str, Any]] | None, field: str = "messages", roles: Sequence[str] = ROLES
) -> list[Message]:
    """The messages in the form that templates expect, or an error that says which one is wrong."""
    check_size(given or (), field, spoken=True)
    return [read_message(message, f"{field}[{i}]", roles) for i, message in enumerate(given or ())]


def check_size(given: Any, field: str, *, spoken: bool = False) -> int:
    """How many values and characters it holds. Raises for too many values, where it stops counting, and for an empty
    conversation (`spoken`)."""
    if spoken and not given:
        raise RequestError(f"{field} is empty; give at least one message.", field=field)
    left: list[Any] = [given]
    count = characters = 0
    while left:
        value = left.pop()
        inside = value.values() if type(value) is dict else value
        count += len(inside)
        if count > MAX_VALUES:
            text = f"{field} holds more than {MAX_VALUES} values (messages, their parts and fields); shorten it."
            raise RequestError(text, field=field)
        for each in inside:
            if type(each) is str:
                characters += len(each)
            elif type(each) is dict or type(each) is list:
                left.append(each)
    return count + characters


def read_content(content: Any, where: str, *, optional: bool = False, media: bool = False) -> Content:
    """`media`: it may hold more than text."""
    if content is None and optional:  # an assistant's turn may be nothing but tool calls
        return ""
    if isinstance(content, list):
        content = as_content([read_part(part, f"{where}[{i}]", media=media) for i, part in enumerate(content)])
    if not isinstance(content, str | list):
        raise RequestError(f"{where} must be a string or a list of parts.", field=where)
    require_utf8(text_of(content), where)
    return content


def as_content(parts: Sequence[str | dict[str, Any]]) -> Content:
    """Text alone as one string."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [text_part(part) if isinstance(part, str) else part for part in parts]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def media_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """In the order of the conversation."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part for content in contents for part in content if "media" in part]


def read_media(messages: Sequence[Message], known: Collection[str], field: str) -> tuple[MediaSource, ...]:
    """The images, clips and recordings of a conversation, for a model that takes these kinds. What is wrong with one is
    said of its part, or of the `field` where there are several."""
    parts = media_parts(messages)
    for kind in sorted({part["type"] for part in parts}):
        places = [part["where"] for part in parts if part["type"] == kind]
        if kind not in known:
            taken = ", ".join(["text", *sorted(known)])
            raise RequestError(f"{places[0]}: this model takes no {kind}; send {taken} only.", field=places[0])
        add_field_names({f"{kind}_data": places[0] if len(places) == 1 else field})
    return tuple(part["media"] for part in parts)


def text_size(messages: Sequence[Message]) -> int:
    """Characters of content, and bytes of media: what rendering and tokenising the messages, or keeping them, costs."""
    sent = sum(len(part["media"].content) for part in media_parts(messages))
    return sent + sum(len(text_of(message["content"])) for message in messages)


def continues(messages: Sequence[Message]) -> bool:
    return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def read_message(message: Mapping[str, Any], where: str, roles: Sequence[str]) -> Message:
    role = message.get("role")
    if role not in roles:
        raise RequestError(f"{where}.role must be one of {', '.join(roles)}; got {role!r}.", field=f"{where}.role")
    # OpenAI's newer name for the same thing; templates know the older one.
    read = {**message, "role": "system" if role == "developer" else role}
    content, media = message.get("content"), role in MEDIA_ROLES
    read["content"] = read_content(content, f"{where}.content", optional=role == "assistant", media=media)
    if message.get("tool_calls") is not None:
        read["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
    return read


def _read_calls(calls: Any, where: str) -> list[Message]:
    """The assistant's calls, with their arguments as objects; arguments that are no JSON stay text."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list of calls.", field=where)
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            text = f"{where}[{i}] must be an object with a function that has a name."
            raise RequestError(text, field=f"{where}[{i}]")
        arguments = function.get("arguments")
        read.append({**call, "function": {**function, "arguments": _arguments_of(arguments)}})
    return read


def join_runs(
    turns: Iterable[Message], goes_on: Callable[[list[Message], Message], bool], separator: str = ""
) -> list[Message]:
    """The turns with each run of them as one; `goes_on` says whether a turn belongs to the run before it."""
    runs: list[list[Message]] = []
    for turn in turns:
        if runs and goes_on(runs[-1], turn):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return [joined_turns(run, separator) for run in runs]


def joined_turns(turns: Sequence[Message], separator: str = "") -> Message:
    """Turns of one role as one; at once, because joining them two by two would copy their texts over and over."""
    joined: Message = {name: value for turn in turns for name, value in turn.items()}
    for name in ("content", "reasoning_content"):
        texts = [turn[name] for turn in turns if turn.get(name)]
        if any(isinstance(text, list) for text in texts):
            joined[name] = [part for text in texts for part in ([text_part(text)] if isinstance(text, str) else text)]
        elif texts or name == "content":
            joined[name] = separator.join(texts)
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def _arguments_of(given: Any) -> Any:
    if not isinstance(given, str) or len(given) > MAX_ARGUMENTS:
        return {} if given is None else given
    try:
        value = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def read_part(part: Any, where: str, *, media: bool = False) -> str | dict[str, Any]:
    """A part's text, or the part itself where it is one of `media` that may be here."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where} must be an object with a type, such as {{'type': 'text', ...}}.", field=where)
    if kind in MEDIA_PARTS and media:
        return _read_media_part(part, kind, where)
    if kind not in TEXT_PARTS:
        known = f"text, {', '.join(MEDIA_PARTS)}" if media else "text parts only"
        problem = f"{where}: parts of type {kind!r} are not supported by this server; send {known}."
        raise RequestError(problem, field=where)
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{TEXT_PARTS[kind]} must be a string.", field=where)
    return text


def _read_media_part(part: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """OpenAI's parts: an object with the address (Responses: the address itself), or a recording in base64."""
    name = "image_url" if kind == "input_image" else kind
    given = part.get(name)
    held = given if isinstance(given, Mapping) else {"url": given, "detail": part.get("detail")}
    if kind == "input_audio":
        return media_part("audio", decode_base64(held.get("data"), f"{where}.input_audio.data"), where)
    if part.get("file_id") is not None:
        raise RequestError(f"{where}.file_id: this server keeps no files; send the image in image_url.", field=where)
    url, detail = held.get("url"), held.get("detail")
    if not isinstance(url, str) or not url:
        raise RequestError(f"{where}.{name} must have a url: http(s), or data with base64.", field=where)
    if detail not in DETAILS:
        raise RequestError(f"{where}: detail must be low, high or auto; got {detail!r}.", field=where)
    frames = held.get("num_frames")
    if frames is not None and not (type(frames) is int and frames > 0):
        raise RequestError(f"{where}: num_frames must be a whole number from 1 on; got {frames!r}.", field=where)
    require_utf8(url, where)
    return media_part(MEDIA_PARTS[kind], url, where, detail, frames)


def media_part(kind: MediaKind, content: bytes | str, where: str, *options: Any) -> dict[str, Any]:
    return {"type": kind, "media": MediaSource(kind, content, *options), "where": where}


def decode_base64(data: Any, where: str) -> bytes:
    try:
        if content := base64.b64decode(data, validate=True):
            return content
    except (TypeError, ValueError):
        pass
    raise RequestError(f"{where} must be a file's bytes in base64.", field=where)

"""What Ollama's clients may send, and what the engine makes of it: options, conversations, prompts.

`None` is "not given" throughout, as a JSON `null` is. Options that concern Ollama's own loading of models (`num_ctx`,
`num_gpu`, ...) are accepted and change nothing, and so is `keep_alive`: the one model is always loaded.
"""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from bough.core.errors import RequestError
from bough.core.sampling_params import INT32_MAX, INT64_MAX, MAX_TEMPERATURE
from bough.core.settings import Settings
from bough.server import bodies
from bough.server.messages import Content, Message, as_content, decode_base64, media_part, read_messages
from bough.server.parsing import unknown_thinking

if TYPE_CHECKING:
    IdleOptions = msgspec.Struct
    OtherAnswerFields = msgspec.Struct
else:
    IdleOptions, OtherAnswerFields = map(bodies.fields_without_effect, ("IdleOptions", "OtherAnswerFields"))


class Options(IdleOptions, kw_only=True):
    """How tokens are chosen. `num_predict` below zero, or left out, means all that is left of the context."""

    num_predict: int | None = None
    temperature: Annotated[float | None, bodies.between(0, MAX_TEMPERATURE)] = None
    top_k: Annotated[int | None, bodies.between(-1, INT32_MAX)] = None
    top_p: Annotated[float | None, bodies.above(0, 1)] = None
    min_p: Annotated[float | None, bodies.between(0, 1)] = None
    seed: Annotated[int | None, bodies.between(-INT64_MAX - 1, INT64_MAX)] = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float | None, bodies.above(0, 2)] = None
    repeat_last_n: int | None = None  # 0 turns the penalty off; else it counts the whole text
    presence_penalty: Annotated[float | None, bodies.between(-2, 2)] = None
    frequency_penalty: Annotated[float | None, bodies.between(-2, 2)] = None
    typical_p: Annotated[float | None, bodies.unsupported(1.0)] = None
    tfs_z: Annotated[float | None, bodies.unsupported(1.0)] = None


class AnswerFields(OtherAnswerFields, kw_only=True):
    """What chats and completions share."""

    model: str | None = None
    stream: bool | None = None  # on unless it is false
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    return_timings: bool | None = None


class GenerateRequest(AnswerFields, kw_only=True):
    """POST /api/generate. Without a prompt it only asks for the model to be loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt as it is, without the model's template
    template: str | None = None
    images: list[str] | None = None  # in base64


class ChatRequest(AnswerFields, kw_only=True):
    """POST /api/chat. Without messages it only asks for the model to be loaded."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """POST /api/show. `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


ROLES = ("system", "user", "assistant", "tool")
SAME_NAMES = ("temperature", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
# The engine's names of fields, and the client's.
NAMES = {
    **{name: f"options.{name}" for name in (*SAME_NAMES, "top_k", *bodies.unsupported_fields(Options))},
    "max_new_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "sampling_seed": "options.seed",
    "json_schema": "format",
}


def check_request(request: AnswerFields, settings: Settings) -> None:
    bodies.refuse_unsupported(request)
    if request.think and settings.model.reasoning_parser is None:
        raise unknown_thinking("think")
    if not isinstance(request, GenerateRequest):
        return
    if request.template:
        instead = "conversations are rendered with the model's own template (or the server's --chat-template)"
        text = f"template is not supported: {instead}; leave it out, or send a finished prompt with raw."
        raise RequestError(text, field="template")
    if request.raw and request.system:
        raise RequestError("raw sends the prompt as it is, so there is no place for system.", field="system")


def sampling_of(options: Options, left: int | None) -> dict[str, Any]:
    """SGLang's sampling parameters; what was not given stays None and takes the model's default. `left` is the limit
    of a client that gave none: the scheduler knows how much of the context is left."""
    bodies.refuse_unsupported(options)
    bodies.check_stops(options.stop, "stop")
    return {
        **{name: getattr(options, name) for name in SAME_NAMES},
        "max_new_tokens": options.num_predict if left is None else left,
        "top_k": -1 if options.top_k == 0 else options.top_k,
        "sampling_seed": None if options.seed == -1 else options.seed,
        "repetition_penalty": 1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
    }


def read_chat(request: ChatRequest) -> list[Message]:
    turns = read_messages(request.messages, roles=ROLES)
    for i, message in enumerate(turns):
        message["content"] = _with_images(message["content"], message.pop("images", None), f"messages[{i}].images")
        if "tool_name" in message:  # which templates know by another name
            message.setdefault("name", message["tool_name"])
    return turns


def read_prompt(request: GenerateRequest) -> list[Message]:
    """A prompt for the model's template: a conversation of one turn."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    turns = read_messages([*system, {"role": "user", "content": request.prompt}], "prompt")
    return [*turns[:-1], {**turns[-1], "content": _with_images(request.prompt or "", request.images)}]


def _with_images(text: Content, images: Any, where: str = "images") -> Content:
    """Images come before the text."""
    if not images:
        return text
    if not isinstance(images, list):
        raise RequestError(f"{where} must be a list of images in base64.", field=where)
    places = [(image, f"{where}[{i}]") for i, image in enumerate(images)]
    parts = [media_part("image", decode_base64(image, place), place) for image, place in places]
    return as_content([*parts, *([text] if isinstance(text, str) else text)])


def template_variables(request: AnswerFields) -> dict[str, Any]:
    if request.think is None:
        return {}
    variables: dict[str, Any] = {"enable_thinking": bool(request.think)}
    return variables | ({"reasoning_effort": request.think} if isinstance(request.think, str) else {})

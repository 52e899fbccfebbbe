"""From Ollama's requests to the engine's: options, conversations, prompts."""

from __future__ import annotations

from typing import Any

from bough.core.errors import RequestError
from bough.core.settings import Settings
from bough.server.bodies import Harmless, check_stops, refuse_unsupported
from bough.server.messages import Message, read_messages
from bough.server.ollama.schema import AnswerFields, ChatRequest, GenerateRequest, Options

ROLES = ("system", "user", "assistant", "tool")
UNSUPPORTED: Harmless = {
    "logprobs": (),
    "top_logprobs": (),
    "suffix": (),
    "images": (),
    "context": (),
    "resume": (),
}
UNSUPPORTED_OPTIONS: Harmless = {"mirostat": (), "typical_p": (1.0,), "tfs_z": (1.0,)}
SAME_NAMES = ("temperature", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
# The engine's names of fields, and the client's.
NAMES = {
    **{name: f"options.{name}" for name in (*SAME_NAMES, "top_k", *UNSUPPORTED_OPTIONS)},
    "max_new_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "sampling_seed": "options.seed",
    "json_schema": "format",
}


def check_request(request: AnswerFields, settings: Settings) -> None:
    """Raises a `RequestError` that names the first field which cannot be served."""
    refuse_unsupported(request, UNSUPPORTED)
    if request.think and settings.model.reasoning_parser is None:
        raise RequestError(
            "think needs a server that knows how its model thinks; start it with --reasoning-parser.", field="think"
        )
    if not isinstance(request, GenerateRequest):
        return
    if request.template:
        raise RequestError(
            "template is not supported: conversations are rendered with the model's own template "
            "(or the server's --chat-template); leave it out, or send a finished prompt with raw.",
            field="template",
        )
    if request.raw and request.system:
        raise RequestError("raw sends the prompt as it is, so there is no place for system.", field="system")


def sampling_of(options: Options, context_length: int) -> dict[str, Any]:
    """SGLang's sampling parameters; what was not given stays None and takes the model's default."""
    refuse_unsupported(options, UNSUPPORTED_OPTIONS)
    check_stops(options.stop, "stop")
    limit = options.num_predict
    return {
        **{name: getattr(options, name) for name in SAME_NAMES},
        # The scheduler knows how much of the context is left.
        "max_new_tokens": context_length if limit is None or limit < 0 else limit,
        "top_k": -1 if options.top_k == 0 else options.top_k,
        "sampling_seed": None if options.seed == -1 else options.seed,
        "repetition_penalty": 1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
    }


def read_chat(request: ChatRequest) -> list[Message]:
    """The conversation, as plain text."""
    turns = read_messages(request.messages, roles=ROLES)
    for i, message in enumerate(turns):
        if message.get("images"):
            where = f"messages[{i}].images"
            raise RequestError(f"{where}: images are not supported by this server; send text only.", field=where)
        if "tool_name" in message:  # which templates know by another name
            message.setdefault("name", message["tool_name"])
    return turns


def read_prompt(request: GenerateRequest) -> list[Message]:
    """A prompt for the model's template: a conversation of one turn."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    return read_messages([*system, {"role": "user", "content": request.prompt}], "prompt")


def template_variables(request: AnswerFields) -> dict[str, Any]:
    if request.think is None:
        return {}
    variables: dict[str, Any] = {"enable_thinking": bool(request.think)}
    return variables | ({"reasoning_effort": request.think} if isinstance(request.think, str) else {})

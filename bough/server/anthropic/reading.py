"""From Anthropic's requests to the engine's: the conversation, its prompt, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.server.anthropic.schema import CountTokensRequest, MessagesRequest
from bough.server.limits import Harmless, check_ranges, check_stops, refuse_unbuilt
from bough.server.messages import Message, read_content, read_messages, render
from bough.server.resuming import read_resumption
from bough.tokenizer.tokenizer import Tokenizer

ROLES = ("user", "assistant", "system")
# The engine's names of fields, and the client's.
NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences", "input_ids": "messages"}
UNBUILT: Harmless = {
    "tools": (),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "mcp_servers": (),
    "thinking": ({"type": "disabled"},),
    "output_format": (),
    "context_management": (),
    "container": (),
}


def check_request(request: CountTokensRequest) -> None:
    """Raises a `RequestError` that names the first field which cannot be served."""
    check_ranges(request)
    refuse_unbuilt(request, UNBUILT)
    if (request.output_config or {}).get("format"):
        raise RequestError(
            "output_config.format is not supported by this server; leave it out.", field="output_config.format"
        )


def read_request(request: MessagesRequest, rid: str) -> dict[str, Any]:
    """What `InputReader.read` is to be given, but for the prompt."""
    check_stops(request.stop_sequences, "stop_sequences")
    return {
        "rid": rid,
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or None,  # none at all is Anthropic's way to leave it off
            "stop": request.stop_sequences,
        },
        **read_resumption(request.resume, request.stream),
    }


def read_conversation(request: CountTokensRequest) -> list[Message]:
    """The system prompt and the turns, as plain text. Turns of the same role in a row are one, as Anthropic says."""
    opening = [] if not request.system else [{"role": "system", "content": read_content(request.system, "system")}]
    turns: list[Message] = []
    for message in [*opening, *read_messages(request.messages, roles=ROLES)]:
        role, content = message["role"], message["content"]
        if turns and turns[-1]["role"] == role:
            content = f"{turns.pop()['content']}\n{content}"
        turns.append({"role": role, "content": content})
    return turns


def prompt_of(request: CountTokensRequest, turns: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens. An answer to a conversation that ends with the assistant's words goes on from there."""
    effort = (request.output_config or {}).get("effort")
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if request.thinking:
        variables["enable_thinking"] = False  # all that `check_request` lets pass
    return render(tokenizer, turns, variables=variables, continue_final_message=turns[-1]["role"] == "assistant")

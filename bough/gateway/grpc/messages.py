"""The messages of `gateway.proto`, converted to and from /v1/completions.

gRPC compiles the classes when this is imported, so no generated code ties the gateway to one protobuf version.
"""

from typing import Any

import grpc
import grpc_tools  # noqa: F401  (gRPC compiles by it; imported here so that its absence is told by its name)
import msgspec
from google.protobuf import json_format

from bough.core.errors import RequestError

protos: Any = grpc.protos("bough/gateway/grpc/gateway.proto")
SERVICE: str = protos.DESCRIPTOR.services_by_name["Gateway"].full_name
GenerateRequest, GenerateReply = protos.GenerateRequest, protos.GenerateReply
HealthRequest, HealthReply = protos.HealthRequest, protos.HealthReply

# Fields that would change the shape of the answer, which is fixed here.
SET_HERE = ("model", "prompt", "stream", "stream_options", "return_token_ids", "n", "best_of", "echo")
# HTTP status → the name of a gRPC status.
CODES = {
    **dict.fromkeys((400, 413, 422), "INVALID_ARGUMENT"),
    **dict.fromkeys((408, 504), "DEADLINE_EXCEEDED"),
    **dict.fromkeys((502, 503), "UNAVAILABLE"),
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
}


def completion_body(request: Any, stream: bool) -> bytes:
    more: dict[str, Any] = json_format.MessageToDict(request.more)  # its numbers are floats, whole ones too
    for name in SET_HERE:
        if name in more:
            raise RequestError(f"more.{name} cannot be set: the gRPC front sets it itself.", field=f"more.{name}")
    if request.WhichOneof("prompt") is None:
        raise RequestError("Give a prompt: text or token_ids.", field="text")
    prompt: Any = request.text if request.WhichOneof("prompt") == "text" else list(request.token_ids.ids)
    body = dict(more)
    for field, value in request.sampling.ListFields():  # what was given, defaults left out
        body[field.name] = list(value) if field.name in ("stop", "stop_token_ids") else value
    body |= {"prompt": prompt, "stream": stream, "return_token_ids": True}
    if request.model:
        body["model"] = request.model
    if stream:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


def reply_of(completion: dict[str, Any]) -> Any:
    """A /v1/completions response or chunk: its first choice, and the usage in one message."""
    choices, usage = completion.get("choices") or [{}], completion.get("usage")
    found = {name: completion.get(name) for name in ("id", "model")} | choices[0]
    if usage is not None:
        found["usage"] = usage | (usage.get("prompt_tokens_details") or {})
    return json_format.ParseDict(found, GenerateReply(), ignore_unknown_fields=True)


def error_text(body: bytes) -> str:
    try:
        content = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body.decode(errors="replace")
    error = content.get("error", content) if isinstance(content, dict) else content
    message = error.get("message") or error.get("status") if isinstance(error, dict) else error
    return str(message) if message else body.decode(errors="replace")

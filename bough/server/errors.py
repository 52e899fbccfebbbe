"""From errors to what clients of each protocol see.

`failure_of` says what happened, once; a shape turns that into the JSON of its protocol. Errors that are neither the
client's nor the engine's are defects: they are logged with their traceback and answered with a 500 without details.
"""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from bough.core.errors import EngineDeadError, RequestError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1  # a full queue moves on within a step; clients add their own backoff
RETRYABLE = frozenset({408, 429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    message: str
    type: str  # such as BadRequestError
    field: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    code: str | None = None  # OpenAI's word for it

    @property
    def retryable(self) -> bool:
        return self.status in RETRYABLE


Shape = Callable[[Failure], dict[str, Any]]


class HttpError(Exception):
    """Ends a request with a status that is not the engine's business: unauthorised, not found, too large."""

    def __init__(self, status: int, message: str, type: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(status, message, type, headers=headers or {})


def failure_of(error: BaseException) -> Failure:
    match error:
        case HttpError():
            return error.failure
        case RequestError():
            headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status_code == 429 else {}
            message, names = error.message, _field_names.get()
            places = [(message.find(name), theirs) for name, theirs in names.items() if "#" in name and name in message]
            field = min(places)[1].partition("#")[0] if places else names.get(error.field or "", error.field)
            return Failure(error.status_code, in_client_names(message), error.err_type, field, headers, error.code)
        case msgspec.ValidationError():
            return _validation_failure(str(error))
        case EngineDeadError():
            return Failure(503, str(error), "EngineDeadError")
        case asyncio.CancelledError():
            return Failure(503, "The server is shutting down.", "ServiceUnavailableError")
        case _:
            log.error("a defect in Bough while answering a request", exc_info=error)
            return Failure(500, "Internal error; the server's log has the details.", "InternalServerError")


def _validation_failure(text: str) -> Failure:
    """msgspec's sentence ends with the place: "Expected `int`, got `str` - at `$.sampling_params.n`"."""
    complaint, _, path = text.partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    found = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", complaint)
    if found is not None:
        name = f"{path}.{found[2]}" if path else found[2]
        word = "Unknown" if found[1] == "contains unknown" else "Missing"
        return Failure(400, f"{word} field {name!r}.", "BadRequestError", name)
    complaint = complaint.replace("`", "").replace(" | null", "")
    complaint = complaint[0].lower() + complaint[1:]
    message = f"{path}: {complaint}." if path else f"The body: {complaint}."
    return Failure(400, message, "BadRequestError", path.split("[")[0] or None)


# ---- field names
#
# The engine names fields as SGLang does. A protocol says, for the request in progress, what its client calls them;
# errors and warnings get these names once, where they are written for the client. A name may also be a place inside a
# field, such as `structural_tag#/format/tags/0/content/json_schema`, where the server put a tool's parameters.

FieldNames = Mapping[str, str]  # the engine's name to the client's
_field_names: ContextVar[FieldNames] = ContextVar(
    "field names of the request in progress", default=MappingProxyType({})
)


def set_field_names(names: FieldNames) -> None:
    _field_names.set(names)


def add_field_names(names: FieldNames) -> None:
    """More names of the request in progress; they win over those that are set."""
    _field_names.set({**_field_names.get(), **names})


def client_name(name: str) -> str:
    return _field_names.get().get(name, name)


def in_client_names(text: str) -> str:
    """A message of the engine's with the client's field names. An identifier or a path is a name wherever it stands; a
    plain word (`prompt`, `regex`) is one only at the beginning of the message and before a path."""
    names = _field_names.get()
    for name in sorted(names, key=len, reverse=True):
        theirs = names[name]
        path = theirs if "#" in theirs else f"{theirs}#"
        text = text.replace(f"{name}#/", f"{path}/")
        if "#" in name:
            text = text.replace(f"{name}/", f"{path}/")
        if "_" in name:
            text = text.replace(name, theirs)
        elif text.startswith(tuple(f"{name}{end}" for end in " ,:.[")):
            text = theirs + text[len(name) :]
    return text


# ---- shapes


def native_shape(failure: Failure) -> dict[str, Any]:
    """SGLang's own routes; the same object ends a broken stream. What SGLang has at the top level stands there, too."""
    error: dict[str, Any] = {"message": failure.message, "type": failure.type, "code": failure.status}
    if failure.field is not None:
        error["param"] = failure.field
    # The gateway knows an event with an error by its first field.
    return {"error": {**error, "retryable": failure.retryable}, "object": "error", **error}


OPENAI_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def openai_shape(failure: Failure) -> dict[str, Any]:
    fallback = "invalid_request_error" if failure.status < 500 else "server_error"
    kind, code = OPENAI_TYPES.get(failure.status, (fallback, failure.type if failure.status == 503 else None))
    return {"error": {"message": failure.message, "type": kind, "param": failure.field, "code": failure.code or code}}


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_shape(failure: Failure) -> dict[str, Any]:
    fallback = "invalid_request_error" if failure.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(failure.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


def ollama_shape(failure: Failure) -> dict[str, Any]:
    return {"error": failure.message}


# Which protocol's errors a path gets that leads to no endpoint.
SHAPES: tuple[tuple[str, Shape], ...] = (
    ("/v1/messages", anthropic_shape),
    ("/v1/", openai_shape),
    ("/api/", ollama_shape),
)


def shape_of(path: str) -> Shape:
    return next((shape for prefix, shape in SHAPES if path.startswith(prefix)), native_shape)

"""From errors to what clients of each protocol see.

`failure_of` says what happened, once; a shape turns that into the JSON of its protocol. Errors that are neither the
client's nor the engine's are defects: they are logged with their traceback and answered with a 500 that says no more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from bough.core.errors import EngineDeadError, RequestError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1  # a full queue moves on within a step; clients add their own backoff
RETRYABLE = frozenset({408, 429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Failure:
    """One request that did not succeed, in no particular protocol."""

    status: int
    message: str
    type: str  # such as BadRequestError
    field: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
    """What to tell the client."""
    match error:
        case HttpError():
            return error.failure
        case RequestError():
            return _failure(error.status_code, error.message, error.err_type, error.field)
        case msgspec.ValidationError():
            return _validation_failure(str(error))
        case EngineDeadError():
            return Failure(503, str(error), "EngineDeadError")
        case asyncio.CancelledError():
            return Failure(503, "The server is shutting down.", "ServiceUnavailableError")
        case _:
            log.error("a defect in Bough while answering a request", exc_info=error)
            return Failure(500, "Internal error; the server's log has the details.", "InternalServerError")


def _failure(status: int, message: str, type: str, field: str | None) -> Failure:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
    return Failure(status, message, type, field, headers)


def _validation_failure(text: str) -> Failure:
    """msgspec's sentence ends with the place: "Expected `int`, got `str` - at `$.sampling_params.n`"."""
    complaint, _, path = text.partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", complaint)
    missing = re.fullmatch(r"Object missing required field `(.*)`", complaint)
    if unknown or missing:
        match = unknown or missing
        assert match is not None
        name = f"{path}.{match[1]}" if path else match[1]
        return Failure(400, f"{'Unknown' if unknown else 'Missing'} field {name!r}.", "BadRequestError", name)
    complaint = complaint.replace("`", "").replace(" | null", "")
    complaint = complaint[0].lower() + complaint[1:]
    message = f"{path}: {complaint}." if path else f"The body: {complaint}."
    return Failure(400, message, "BadRequestError", path.split("[")[0] or None)


# ---- shapes


def native_shape(failure: Failure) -> dict[str, Any]:
    """SGLang's own routes; the same object ends a broken stream."""
    error: dict[str, Any] = {
        "message": failure.message,
        "type": failure.type,
        "code": failure.status,
        "retryable": failure.retryable,
    }
    if failure.field is not None:
        error["param"] = failure.field
    return {"error": error}


OPENAI_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def openai_shape(failure: Failure) -> dict[str, Any]:
    fallback = "invalid_request_error" if failure.status < 500 else "server_error"
    kind, code = OPENAI_TYPES.get(failure.status, (fallback, None))
    return {"error": {"message": failure.message, "type": kind, "param": failure.field, "code": code}}


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

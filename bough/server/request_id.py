"""The id of one HTTP request: the client's own `X-Request-Id`, or a fresh one; it goes back with the response."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import Scope

HEADER = "X-Request-Id"
SCOPE_KEY = "bough.request_id"
ALLOWED = re.compile(rb"[\x21-\x7e]{1,128}")  # visible ASCII: nothing that could break a header or a log line


def request_id(request: Request) -> str:
    """The id under which this HTTP request is known in the log and to its client."""
    found: str = request.scope.get(SCOPE_KEY) or assign_request_id(request.scope)
    return found


def assign_request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    chosen = given.decode() if ALLOWED.fullmatch(given) else uuid.uuid4().hex
    scope[SCOPE_KEY] = chosen
    return chosen

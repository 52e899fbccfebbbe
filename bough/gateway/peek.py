"""What the gateway must know of a request's body to route it; the body itself passes as it came.

Only the fields named here are read, and of any type: a body that no worker can use is the worker's to refuse.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bough.gateway.headers import RawHeaders, header
from bough.gateway.policies import RoutingRequest


class _Fields(msgspec.Struct):
    model: Any = None
    stream: Any = None
    priority: Any = None
    messages: Any = None
    system: Any = None
    prompt: Any = None
    text: Any = None
    input_ids: Any = None
    input: Any = None
    instructions: Any = None
    previous_response_id: Any = None


FIELDS = frozenset(_Fields.__struct_fields__)
LARGEST_ID = 2**31 - 1  # what caches compare; no vocabulary is near it
MOST_IDS = 2**17  # of a prompt that routing looks at: each takes far more memory than in the body
_DECODER = msgspec.json.Decoder(_Fields)
_NOTHING = _Fields()


class Peek(msgspec.Struct, frozen=True):
    """The part of a request that routing is about."""

    model: str | None
    streams: bool
    priority: int
    routing: RoutingRequest
    previous_response_id: str | None


def peek(body: bytes, headers: RawHeaders) -> Peek:
    fields = _fields(body)
    try:
        text, ids = _prompt(fields)
    except RecursionError:  # nested so deep that no worker will take it
        text, ids = "", None
    model = fields.model if isinstance(fields.model, str) and fields.model else None
    routing = RoutingRequest(
        model=model or "",
        text=text,
        token_ids=ids,
        session=header(headers, b"x-smg-routing-key", b"x-session-id"),
        target=header(headers, b"x-smg-target-worker"),
    )
    priority = fields.priority if isinstance(fields.priority, int) else 0
    earlier = fields.previous_response_id
    return Peek(model, fields.stream is True, priority, routing, earlier if isinstance(earlier, str) else None)


def _fields(body: bytes) -> _Fields:
    if not body:
        return _NOTHING
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _NOTHING


def _prompt(fields: _Fields) -> tuple[str, tuple[int, ...] | None]:
    """The prompt as text, and as ids where it came so."""
    if fields.messages is not None:
        return _words(fields.system) + _words(fields.messages), None
    for given in (fields.text, fields.prompt, fields.input_ids, fields.input):
        if given is None:
            continue
        ids = _ids(given)
        if ids is not None:
            return " ".join(map(str, ids)), ids
        return _words(fields.instructions) + _words(given), None
    return "", None


def _ids(given: Any) -> tuple[int, ...] | None:
    """Token ids; of several prompts, the first, which is where a shared beginning shows."""
    if not isinstance(given, list) or not given:
        return None
    first = (given[0] if isinstance(given[0], list) else given)[:MOST_IDS]
    return tuple(first) if all(type(entry) is int and 0 <= entry <= LARGEST_ID for entry in first) else None


def _words(given: Any) -> str:
    """All text in a prompt, a list of prompts, or messages with their roles, in order."""
    if isinstance(given, str):
        return given + "\n"
    if isinstance(given, list):
        return "".join(map(_words, given))
    if isinstance(given, dict):
        return "".join(_words(given.get(name)) for name in ("role", "content", "text"))
    return ""

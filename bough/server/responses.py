"""Responses with JSON that msgspec writes: structs, dicts and lists alike, several times faster than `json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from bough.server.errors import Failure, Shape

_ENCODER = msgspec.json.Encoder()
encode_json = _ENCODER.encode


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON body; NaN and infinities become null."""
    return Response(encode_json(content), status, headers, "application/json")


def error_response(failure: Failure, shape: Shape) -> Response:
    return json_response(shape(failure), failure.status, failure.headers)

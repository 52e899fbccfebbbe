"""No value of any field gives anything but an answer or a refusal that a client can understand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bough.server.openai import routes
from bough.server.openai.requests import ChatRequest, CompletionRequest, ResponsesRequest
from tests.server.protocol_desk import ODD, Desk, at_desk

ROUTES: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "a"}),
    ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", ResponsesRequest, {"input": "a"}),
]


@pytest.mark.parametrize(("path", "struct", "base"), ROUTES)
def test_odd_values_are_served_or_refused(path: str, struct: type[msgspec.Struct], base: dict[str, Any]) -> None:
    async def use(desk: Desk) -> None:
        for field in struct.__struct_fields__:
            for value in ODD:
                # Thousands of samples prove nothing more.
                if field in ("n", "best_of") and value == 2**70:
                    continue
                reply = await desk.http.post(path, json={**base, field: value})
                assert reply.status_code in (200, 400), (field, value, reply.status_code, reply.text)
                if reply.status_code == 400:
                    error = reply.json()["error"]
                    assert error["message"] and error["param"], (field, value, error)

    at_desk(routes, use)

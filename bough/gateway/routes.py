"""How the gateway's own routes are found and answered: the words that `management`, `processes` and `app` share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from bough.core.errors import RequestError
from bough.gateway.answers import JSON, Answer
from bough.gateway.call import Call
from bough.gateway.worker import Worker
from bough.server.endpoint import Access, encode_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    parameters: Mapping[str, str]
    body: bytes


Handler = Callable[[Request], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Route:
    """A handler that was found for a request."""

    handler: Handler
    access: Access
    parameters: Mapping[str, str]


class RouteTable(Protocol):
    """Finds the routes that are the gateway's own; of one process, or shared by several."""

    def find(self, method: str, path: str) -> Route | None: ...

    async def holder_of(self, call: Call, name: str) -> Worker | None: ...


def json_answer(content: Any, status: int = 200) -> Answer:
    return Answer(status, [(b"content-type", JSON)], encode_json(content))


def decoded(body: bytes, kind: type[T]) -> T:
    """The body as a struct; a field that is missing or of another type is named in the error."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise RequestError(f"The body is not JSON: {error}.") from None

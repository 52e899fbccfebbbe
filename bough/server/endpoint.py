"""One route, declared once: how it is reached, which key it needs, what it takes and returns, and how its errors look.

What a handler raises before the first byte is sent becomes an error in the protocol's own shape. Keys are compared in
constant time and never appear in a response or a log line.
"""

import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from bough.server import errors
from bough.server.bodies import read_body

_ENCODER = msgspec.json.Encoder()
encode_json = _ENCODER.encode


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON body; NaN and infinities become null."""
    return Response(encode_json(content), status, headers, "application/json")


def error_response(failure: errors.Failure, shape: errors.Shape) -> Response:
    return json_response(shape(failure), failure.status, failure.headers)


Handler = Callable[..., Awaitable[Response]]  # takes the request and, where the endpoint has one, its body
EVENTS = "text/event-stream"
GET = ("GET",)
BINARY = Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]  # as OpenAPI says it
# No key; the API's key; the key for management; the same, but an API key never takes its place.
Access = Literal["open", "api", "admin", "admin_only"]
# What all endpoints of a protocol share.
OPENAI: dict[str, Any] = {"shape": errors.openai_shape, "tag": "openai"}
ANTHROPIC: dict[str, Any] = {"shape": errors.anthropic_shape, "tag": "anthropic"}
OLLAMA: dict[str, Any] = {"shape": errors.ollama_shape, "tag": "ollama"}


@dataclass(frozen=True, slots=True)
class Query:
    name: str
    type: Any  # whose JSON schema goes on the page
    about: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path with its handler. `body`, a struct, and `answer` are types whose JSON schema goes on the OpenAPI page."""

    path: str
    handler: Handler
    summary: str
    _: KW_ONLY
    methods: tuple[str, ...] = ("POST",)
    access: Access = "api"
    shape: errors.Shape = errors.native_shape
    tag: str = "native"
    body: Any = None
    own_bodies: tuple[tuple[str, Any], ...] = ()  # media types and types of bodies that the handler reads by itself
    answer: Any = None
    media_type: str = "application/json"
    other_types: tuple[str, ...] = ()  # media types that the answer has where it is asked for, such as EVENTS
    event: Any = None  # the type of each event's data, where there are EVENTS of one type
    queries: tuple[Query, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        errors.set_field_names({})  # a request that follows on its connection begins in its context
        request = Request(scope, receive)
        try:
            given = () if self.body is None else (await read_body(request, self.body),)
            response = await self.handler(request, *given)
            await response(scope, receive, watched_send)
        except ClientDisconnect:  # there is no one to send an error to
            return
        except Exception as error:
            # Not swallowed: the client gets an error, and a defect is logged with its traceback.
            if begun:
                raise
            await error_response(errors.failure_of(error), self.shape)(scope, receive, send)


class Keys:
    """With only an API key, that opens management too, but not what is the operator's alone; with both, only the admin
    key does."""

    def __init__(self, api_key: str | None, admin_api_key: str | None, program: str = "server") -> None:
        self._program = program
        self._one_for_all = admin_api_key is None
        self._needed: dict[Access, bytes | None] = {
            "open": None,
            "api": _encoded(api_key),
            "admin": _encoded(admin_api_key if admin_api_key is not None else api_key),
            "admin_only": _encoded(admin_api_key),
        }
        self._closed = api_key is not None and admin_api_key is None  # to all that an API key must not open

    def check(self, access: Access, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if access == "admin_only" and self._closed:
            advice = f"start the {self._program} with --admin-api-key and send that key"
            raise errors.HttpError(403, f"This route is refused to clients; {advice}.", "PermissionDeniedError")
        needed = self._needed[access]
        if needed is None:
            return
        given = sent_keys(headers)
        # Every candidate is compared in full, so that the time reveals nothing.
        if not any([hmac.compare_digest(key, needed) for key in given]):  # noqa: C419
            raise unauthorised("api" if self._one_for_all else access, given)


def sent_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    sent = (READERS[name](value).strip() for name, value in headers if name in READERS)
    return [key for key in sent if key]


def unauthorised(access: Access, given: list[bytes]) -> errors.HttpError:
    what = "API key" if access == "api" else "admin key"
    problem = f"This route needs the {what}: " + ("the one sent is wrong." if given else "none was sent.")
    hint = " Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return errors.HttpError(401, problem + hint, "AuthenticationError", {"WWW-Authenticate": "Bearer"})


def _encoded(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    return key if scheme.lower() == b"bearer" else b""


READERS: dict[bytes, Callable[[bytes], bytes]] = {b"authorization": _bearer, b"x-api-key": bytes}

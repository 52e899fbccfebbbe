"""The gateway's HTTP edge: which paths it answers, which it proxies, who may call them, and how errors look."""

import re
import time

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from bough.gateway.call import Call
from bough.gateway.clients import ClientKey
from bough.gateway.core import Gateway
from bough.gateway.headers import Headers, upstream_headers
from bough.gateway.health import LOADS
from bough.gateway.management import Management
from bough.gateway.outlet import Outlet, whole_message
from bough.gateway.peek import Peek, is_heavy, peek
from bough.gateway.responses import INFO_PATHS, JSON_PATHS, Response
from bough.observability.logs import current_request
from bough.server.app import REQUEST_ID_KEY
from bough.server.endpoint import Access, encode_json
from bough.server.errors import Failure, HttpError, failure_of, shape_of
from bough.server.held_bodies import MIB, HeldBody
from bough.server.http_protocol import EXCHANGE_KEY, HEADERS_KEY
from bough.server.page import zipped

LARGEST_OWN = MIB  # bytes of a body for a route of the gateway's own
PREFIXES = ("/v1/", "/api/")
# Besides everything below these: the native routes of a worker that concern one worker, and what it says of its routes.
NATIVE_PATHS = frozenset(
    {"/generate", "/tokenize", "/detokenize", "/encode", "/classify", "/rerank", "/health_generate"}
    | {"/parse_function_call", "/separate_reasoning", "/get_load", "/invocations", "/vertex_generate"}
    | INFO_PATHS
    | {"/weight_version", "/get_weight_version"}
    | {"/docs", "/openapi.json"}
)
# What changes a worker itself, of whatever make, and all below it: proxied like the rest, but for the operator alone.
MANAGEMENT_WORDS = "admin|blobs|copy|create|delete|internal|pull|push|switch|(un|down)?load"
WORKER_MANAGEMENT = re.compile(rf"(?i)/(v1|api)/((un)?load_lora_adapter|(.*/)?({MANAGEMENT_WORDS}))(/|$)")
AMBIGUOUS = re.compile(r"//|;|/\.{1,2}(/|$)")  # lenient servers read these as another path, maybe of their management
STORED = "/v1/responses/"
JSON_TYPES = frozenset({b"", b"application/json", b"application/x-www-form-urlencoded"})


class GatewayApp:
    def __init__(self, gateway: Gateway, management: Management, *, private: bool = False) -> None:
        self._gateway = gateway
        self._private = private  # only the gateway's own processes can call
        self._management = management

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        headers: Headers = scope[HEADERS_KEY]
        call: Call | None = None
        client: ClientKey | None = None
        refusable = False  # a client's request, and not one to the gateway itself
        gateway = self._gateway
        held = HeldBody(gateway.bodies)
        try:
            plain = path in JSON_PATHS  # as nearly always: nobody's management, and read as itself everywhere
            route = None if plain else self._management.find(scope["method"], path)
            if route is not None:
                if not self._private:
                    gateway.clients.identify(route.access, scope["headers"])
                body = await held.read(scope, receive, LARGEST_OWN)
                answer = await route.handler(route.parameter, body)
                if (b"vary", b"accept-encoding") in answer.headers and b"gzip" in headers.get(b"accept-encoding", b""):
                    headed = [*answer.headers, (b"content-encoding", b"gzip")]
                    answer = Response(answer.status, headed, zipped(answer.body))
                await send(whole_message(answer))
                return
            known = plain or ((path.startswith(PREFIXES) or path in NATIVE_PATHS) and not AMBIGUOUS.search(path))
            if self._private or not known:
                proxied = ", ".join((*(f"{prefix}*" for prefix in PREFIXES), *sorted(NATIVE_PATHS)))
                raise HttpError(404, f"There is no {path} here; the gateway proxies {proxied}.", "NotFoundError")
            refusable = True
            if not (plain and gateway.clients.open_to_all):
                shows = path in INFO_PATHS and gateway.clients.is_operator(scope["headers"])
                access: Access = "admin" if shows or (not plain and WORKER_MANAGEMENT.match(path)) else "api"
                client = gateway.clients.identify(access, scope["headers"])
                gateway.clients.count(client, time.monotonic())
            whole = held.whole(scope)
            body = await held.read(scope, receive) if whole is None else whole
            peeked = peek(await gateway.bodies.excerpt(body) if is_heavy(body) else body, headers)
            not_json = peeked.not_json
            if not body and scope["method"] in ("POST", "PUT") and (path in JSON_PATHS or not path.startswith("/v1/")):
                not_json = "it is empty"
            if not_json is not None and takes_json(path, headers):
                raise HttpError(400, f"The body is not a valid JSON object: {not_json}.", "BadRequestError")
            call = make_call(scope, body, peeked, client)
            stored = not plain and path.startswith(STORED)
            name = path[len(STORED) :].split("/")[0] if stored else peeked.previous_response_id
            if name is not None:
                call.pinned = gateway.sticky.find(name) or await self._management.holder_of(name)
            outlet = Outlet(call, send, scope[EXCHANGE_KEY])
            # Where no worker tells its loads, one of them says why: it is proxied like the rest.
            of_all = call.method == "GET" and path == LOADS
            loads = await self._management.loads(call.target.decode("latin-1")) if of_all else None
            await (gateway.serve(call, outlet) if loads is None else outlet.whole(loads))
        except ClientDisconnect:
            return
        except Exception as error:  # not swallowed: the client gets an error, and a defect is logged with its traceback
            if call is not None and call.status:
                raise
            if call is None and refusable:  # a request all the same, for those who count
                call = make_call(scope, b"", peek(b"", headers), client)
                call.began_s = current_request.get()[1]
            await self._refuse(failure_of(error), scope, call, send)
        finally:
            held.release()
            if call is not None:
                gateway.ended(call)

    async def _refuse(self, failure: Failure, scope: Scope, call: Call | None, send: Send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in failure.headers.items()]
        headers.append((b"content-type", b"application/json"))
        answer = Response(failure.status, headers, encode_json(shape_of(scope["path"])(failure)))
        if failure.type == "RateLimitError":
            self._gateway.metrics.rate_limited[()] += 1
        if call is None:
            await send(whole_message(answer))
        else:
            call.error = failure.message
            await Outlet(call, send, scope[EXCHANGE_KEY]).whole(answer)


def takes_json(path: str, given: Headers) -> bool:
    """Whether a body must be a JSON object. Forms with files and encoded bodies are for the worker to read; who sends
    JSON with curl calls it a form by default."""
    kind = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return b"content-encoding" not in given and (path in JSON_PATHS or kind in JSON_TYPES)


def make_call(scope: Scope, body: bytes, peeked: Peek, client: ClientKey | None) -> Call:
    raw_path, query, request_id = scope["raw_path"], scope["query_string"], scope[REQUEST_ID_KEY]
    target = raw_path + b"?" + query if query else raw_path
    headers = upstream_headers(scope["headers"], scope[HEADERS_KEY], request_id, scope["client"])
    name = None if client is None else client.name
    return Call(scope["method"], scope["path"], target, headers, body, peeked, request_id, name, client is not None)

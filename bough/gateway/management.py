"""The routes that the gateway answers itself: workers, policies, health, models.

`/workers` and what reaches all workers needs the admin key; health and metrics are open, as on a server.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from bough.core.errors import RequestError, SettingsError
from bough.core.gateway_settings import BOOTSTRAP_PORT
from bough.gateway.core import Gateway
from bough.gateway.health import loads_of
from bough.gateway.http_client import describe
from bough.gateway.metrics import CONTENT_TYPE
from bough.gateway.policy_table import PolicyChoice
from bough.gateway.registry import LAUNCHED, checked_key
from bough.gateway.responses import JSON, Response, scrubbed
from bough.gateway.worker import Worker
from bough.server.bodies import decode_body
from bough.server.endpoint import Access, encode_json
from bough.server.errors import HttpError
from bough.server.page import INDEX, page_file
from bough.version import __version__

FANNED_OUT = ("/abort_request", "/pause_generation", "/continue_generation")
FAN_OUT_TIMEOUT_S = 30.0
# What `/workers` shows of a worker as it is.
SHOWN = (
    "id", "url", "bootstrap_port", "state", "load", "reported_load", "limit", "source", "pid", "restarts", "last_error",
)  # fmt: skip
Restart = Callable[[Worker], Awaitable[None]]
Handler = Callable[[str, bytes], Awaitable[Response]]  # of the path's parameters, joined by slashes, and the body


class Route(NamedTuple):
    handler: Handler
    access: Access
    parameter: str


class NewWorker(msgspec.Struct):
    url: str
    api_key: str | None = None
    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class NewPolicy(msgspec.Struct):
    policy: str
    model: str | None = None
    options: dict[str, Any] = {}


class Management:
    """`restart` replaces the process of a worker that the gateway has launched."""

    def __init__(self, gateway: Gateway, restart: Restart | None = None) -> None:
        self.gateway = gateway
        self._restart = restart
        one = r"/workers/([^/]+)"
        routes: dict[str, dict[str, tuple[Handler, Access]]] = {
            "/workers": {"GET": (self._list, "admin"), "POST": (self._add, "admin")},
            one: {"GET": (self._of_one(), "admin"), "DELETE": (self._of_one(gateway.registry.remove), "admin")},
            f"{one}/drain": {"POST": (self._of_one(gateway.registry.drain, 202), "admin")},
            f"{one}/restart": {"POST": (self._restart_one, "admin")},
            "/policies": {"GET": (self._policies, "admin"), "PUT": (self._set_policy, "admin")},
            "/routing": {"GET": (self._routing, "admin")},
            "/flush_cache": {method: (self._to_all("/flush_cache"), "admin") for method in ("GET", "POST")},
            **{path: {"POST": (self._to_all(path), "admin")} for path in FANNED_OUT},
            "/readiness": {"GET": (self._readiness, "open")},
            **{path: {"GET": (_alive, "open")} for path in ("/liveness", "/health", "/ping")},
            "/metrics": {"GET": (self._metrics, "open")},
            r"/ui((?:/[^/]*)?)": {"GET": (_page, "open")},
            "/ui/tree/([^/]+)": {"GET": (self._watch("/ui/tree"), "admin")},
            "/ui/tree/([^/]+)/text/([^/]+)": {"GET": (self._watch("/ui/tree/text", "node"), "admin")},
            "/ui/timeline/([^/]+)/([^/]+)": {"GET": (self._watch("/ui/timeline", "since"), "admin")},
            "/ui/timeline/([^/]+)/([^/]+)/([^/]+)": {"GET": (self._watch("/ui/timeline", "since", "rid"), "admin")},
            "/v1/models": {"GET": (self._models, "api")},
            r"/v1/models/(.+)": {"GET": (self._model, "api")},
        }
        hidden = "/ui" if gateway.settings.disable_ui else "-"
        self._routes = [(re.compile(way), methods) for way, methods in routes.items() if not way.startswith(hidden)]

    def find(self, method: str, path: str) -> Route | None:
        """Raises a 405 for a method that the path does not take."""
        if path.startswith("/v1/") and not path.startswith("/v1/models"):
            return None  # the way of most requests
        for pattern, methods in self._routes:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            found = methods.get("GET" if method == "HEAD" else method)
            if found is None:
                allowed = ", ".join(sorted(methods))
                message = f"{path} takes {allowed}, not {method}."
                raise HttpError(405, message, "MethodNotAllowedError", {"Allow": allowed})
            return Route(*found, "/".join(match.groups()))
        return None

    async def holder_of(self, name: str) -> Worker | None:
        """The worker that has a stored response which this gateway has not seen."""
        workers = [worker for worker in self.gateway.registry if worker.in_rotation]
        if len(workers) < 2:
            return None
        path = f"/v1/responses/{quote(name, safe='')}"
        statuses = await asyncio.gather(*(self._ask(worker, "GET", path) for worker in workers))
        found = next((worker for worker, status in zip(workers, statuses, strict=True) if status == 200), None)
        if found is not None:
            self.gateway.sticky.remember(name, found)
        return found

    # ---- workers

    async def _list(self, parameter: str, body: bytes) -> Response:
        workers = [worker_json(worker) for worker in self.gateway.registry]
        return json_response({"workers": workers, "total": len(workers)})

    async def _add(self, parameter: str, body: bytes) -> Response:
        new = decode_body(body, NewWorker)
        field = "api_key"
        try:
            checked_key(new.api_key)
            field = "url"
            port = (new.bootstrap_port or BOOTSTRAP_PORT) if new.worker_type == "prefill" else None
            worker = self.gateway.registry.add(new.url, new.api_key, bootstrap_port=port)
            if worker.source != LAUNCHED:  # those are let in again by a restart
                self.gateway.registry.drain(worker, draining=False)
        except SettingsError as error:
            raise RequestError(str(error), field=field) from None
        return json_response(worker_json(worker), 202)

    def _of_one(self, act: Callable[[Worker], None] = lambda worker: None, status: int = 200) -> Handler:
        async def handler(identity: str, body: bytes) -> Response:
            worker = self._worker(identity)
            act(worker)
            return json_response(worker_json(worker), status)

        return handler

    async def _restart_one(self, identity: str, body: bytes) -> Response:
        worker = self._worker(identity)
        if self._restart is None or worker.source != LAUNCHED:
            message = "Only workers that the gateway has started (--launch) can be restarted by it."
            raise HttpError(409, message, "ConflictError")
        await self._restart(worker)
        return json_response(worker_json(worker), 202)

    def _worker(self, identity: str) -> Worker:
        worker = self.gateway.registry.get(identity)
        if worker is None:
            raise HttpError(404, f"There is no worker {identity!r}; GET /workers lists them.", "NotFoundError")
        return worker

    # ---- policies

    async def _policies(self, parameter: str, body: bytes) -> Response:
        return json_response(self.gateway.policies.shown())

    async def _set_policy(self, parameter: str, body: bytes) -> Response:
        new = decode_body(body, NewPolicy)
        choice = PolicyChoice(new.policy, new.options)
        try:
            if new.model is None:
                self.gateway.policies.set_default(choice)
            else:
                self.gateway.policies.choose(new.model, choice)
        except SettingsError as error:
            raise RequestError(str(error), field="policy") from None
        return await self._policies(parameter, body)

    async def _routing(self, parameter: str, body: bytes) -> Response:
        return json_response({"requests": self.gateway.log.recent()})

    def _watch(self, path: str, *names: str) -> Handler:
        """For the page: a worker's timeline or a node's text, by the queries `names`, or the first event of its tree's
        stream. Past policies, log and counts: a look is no request, and a worker that takes none is looked at too."""

        async def look(parameter: str, body: bytes) -> Response:
            identity, *given = parameter.split("/")
            worker, content = self._worker(identity), b""
            target = f"{path}?{urlencode(dict(zip(names, given, strict=True)))}"
            try:
                async with asyncio.timeout(FAN_OUT_TIMEOUT_S):
                    answer = await self.gateway.upstream.send(worker, "GET", target.encode(), [], b"")
                    with contextlib.closing(answer):
                        while (names or not content.endswith(b"\n\n")) and (part := await answer.read_some()):
                            content += part
            except OSError as error:
                raise HttpError(502, f"The worker does not answer: {describe(error)}.", "BadGatewayError") from None
            if answer.status in (401, 403):  # the client's own key is right
                advice = "; for text it must be the worker's --admin-api-key as well" if "node" in names else ""
                refusal = f"The worker refuses the gateway's key (--worker-api-key){advice}."
                raise HttpError(502, refusal, "BadGatewayError")
            kind = [(b"content-type", answer.content_type)]
            return Response(answer.status, kind, scrubbed(content, worker.api_key))

        return look

    # ---- what reaches all workers

    def _to_all(self, path: str) -> Handler:
        async def fan_out(parameter: str, body: bytes) -> Response:
            workers = [worker for worker in self.gateway.registry if worker.available]
            statuses = await asyncio.gather(*(self._ask(worker, "POST", path, body) for worker in workers))
            results = {worker.url: status for worker, status in zip(workers, statuses, strict=True)}
            answer = 200 if all(status == 200 for status in statuses) else 502
            if len(set(statuses)) == 1 and 400 <= statuses[0] < 500:
                answer = statuses[0]  # they all refuse the request itself
            return json_response({"workers": results}, answer)

        return fan_out

    async def loads(self, target: str) -> Response | None:
        """What one server with the replicas of all workers would say; None where no worker says anything."""
        upstream, limit_s = self.gateway.upstream, self.gateway.settings.health_check_timeout_secs

        async def told(worker: Worker) -> list[dict[str, Any]]:
            with contextlib.suppress(OSError):
                return [{**load, "worker": worker.id} for load in await loads_of(upstream, worker, target, limit_s)]
            return []

        of_each = await asyncio.gather(*(told(worker) for worker in self.gateway.registry if worker.available))
        loads = [load for of_one in of_each for load in of_one]
        content = {"timestamp": time.time(), "version": __version__, "dp_rank_count": len(loads), "loads": loads}
        return json_response(content) if loads else None

    async def _ask(self, worker: Worker, method: str, path: str, body: bytes = b"") -> int:
        """The status of a short call; 0 without an answer."""
        headers = [(b"content-type", JSON)] if body else []
        try:
            status, _ = await self.gateway.upstream.ask(worker, method, path, FAN_OUT_TIMEOUT_S, headers, body)
        except OSError:
            return 0
        return status

    # ---- the gateway itself

    async def _readiness(self, parameter: str, body: bytes) -> Response:
        ready = len(self.gateway.registry.available(None))
        total = len(self.gateway.registry)
        status = "ready" if ready else "not ready: no worker is in rotation"
        answer = {"status": status, "healthy_workers": ready, "total_workers": total}
        return json_response(answer, 200 if ready else 503)

    async def _metrics(self, parameter: str, body: bytes) -> Response:
        return Response(200, [(b"content-type", CONTENT_TYPE.encode())], self.gateway.metrics.page())

    async def _models(self, parameter: str, body: bytes) -> Response:
        return json_response({"object": "list", "data": [_model(name) for name in self.gateway.registry.models()]})

    async def _model(self, name: str, body: bytes) -> Response:
        known = self.gateway.registry.models()
        if name not in known:
            message = f"There is no model {name!r}. The models here are {', '.join(known)}."
            raise HttpError(404, message, "NotFoundError")
        return json_response(_model(name))


async def _alive(parameter: str, body: bytes) -> Response:
    return json_response({"status": "ok"})


async def _page(name: str, body: bytes) -> Response:
    """The server's page, which shows the workers as well when a gateway serves it."""
    if name == "/":
        return Response(307, [(b"location", b"../ui")], b"")
    file = page_file(name[1:] or INDEX)
    shown = file.body if name else file.body.replace(b'data-of="server"', b'data-of="gateway"')
    return Response(200, [(key.encode(), value.encode()) for key, value in file.headers.items()], shown)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "bough"}


def json_response(content: Any, status: int = 200) -> Response:
    return Response(status, [(b"content-type", JSON)], encode_json(content))


def worker_json(worker: Worker) -> dict[str, Any]:
    """A worker as `/workers` shows it, without its key."""
    known = worker.capabilities
    return {
        **{name: getattr(worker, name) for name in SHOWN},
        "model_id": known.models[0] if known.models else None,
        "models": list(known.models),
        "worker_type": "regular" if worker.bootstrap_port is None else "prefill",
        "is_healthy": worker.in_rotation,
        "capacity": known.capacity,
        "breaker": worker.breaker.state(time.monotonic()).name.lower(),
        "version": known.version,
    }

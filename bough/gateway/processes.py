"""`--processes N`: several gateway processes on one port that look like one.

Each process proxies on its own. The first answers management for all over unix sockets in a private folder: it passes
changes on and adds up counts. Limits and rates are divided among the processes.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import select
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp

from bough.core.child_environment import child_environment
from bough.core.errors import SettingsError
from bough.core.gateway_settings import UNLIMITED, GatewaySettings
from bough.core.server_settings import ServerSettings
from bough.gateway.core import Gateway
from bough.gateway.http_client import HttpClient, Origin
from bough.gateway.management import Handler, Management, Restart, Route, json_response
from bough.gateway.metrics import merged_pages
from bough.gateway.policy_table import PolicyChoice
from bough.gateway.registry import DISCOVERED
from bough.gateway.responses import Response
from bough.server.errors import HttpError
from bough.server.http import HttpServer, cancel_all, open_listener

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0
RESTART_PAUSE_S = 1.0
STATE = "/group/state"
SHARED = ("/workers", "/policies", "/metrics")


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """For sockets, closed to other users. `bough.launch.engine_processes` names its folders the same way, so the next
    engine removes what a killed gateway leaves behind."""
    return tempfile.TemporaryDirectory(prefix=f"bough-{os.getpid()}-")


@contextlib.asynccontextmanager
async def serving_privately(app: ASGIApp, path: Path) -> AsyncIterator[None]:
    """HTTP on a unix socket, for the gateway itself."""
    edge = ServerSettings(uds=str(path))
    with contextlib.closing(open_listener(edge)) as listener:
        async with HttpServer(app, listener, edge).serving():
            yield


def divided(settings: GatewaySettings, number: int = 0) -> GatewaySettings:
    """One process's share of the gateway's limits. Raises a `SettingsError` if a process would be left without any."""
    for name in ("max_concurrent_requests", "max_concurrent_per_worker"):
        if UNLIMITED < getattr(settings, name) < settings.processes:
            flag = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{flag} is divided among --processes, so it must be at least {settings.processes}.")

    def part(limit: int) -> int:
        share, left = divmod(limit, settings.processes)
        return limit if limit == UNLIMITED else share + (number < left)

    return dataclasses.replace(
        settings,
        max_concurrent_requests=part(settings.max_concurrent_requests),
        max_concurrent_per_worker=part(settings.max_concurrent_per_worker),
        queue_size=part(settings.queue_size),
    )


class ProcessGroup:
    """The other processes of the gateway, as one of them sees them."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self.number = number
        self._folder = folder
        self._count = count
        self._client = HttpClient()
        self._origins = [Origin("group", 0, socket_path=str(self.socket_path(other))) for other in range(count)]

    @property
    def first_is_gone(self) -> bool:
        """Whether standard input has ended, which the first process keeps open for the others while it lives."""
        return self.number > 0 and bool(select.select([0], [], [], 0)[0])

    def socket_path(self, number: int | None = None) -> Path:
        return self._folder / f"{self.number if number is None else number}.sock"

    async def ask(self, number: int, method: str, path: str, body: bytes = b"") -> Response | None:
        """None without an answer."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                reply = await self._client.request(self._origins[number], method, quote(path).encode(), (), body)
                with contextlib.closing(reply):
                    kind = reply.named.get(b"content-type", b"")
                    return Response(reply.status, [(b"content-type", kind)], await reply.read())
        except OSError:
            return None

    async def ask_others(self, method: str, path: str, body: bytes = b"") -> list[Response]:
        others = (number for number in range(self._count) if number != self.number)
        answers = await asyncio.gather(*(self.ask(number, method, path, body) for number in others))
        return [answer for answer in answers if answer is not None]

    def close(self) -> None:
        self._client.close()


class SharedManagement(Management):
    """Management of all processes: the first answers, the others forward to it."""

    def __init__(
        self, gateway: Gateway, group: ProcessGroup, restart: Restart | None = None, *, private: bool = False
    ) -> None:
        super().__init__(gateway, restart)
        self._group = group
        self._private = private  # only the other processes can call

    def find(self, method: str, path: str) -> Route | None:
        if self._private and path == STATE:
            return Route(self._state, "open", "")
        route = super().find(method, path)
        if route is None or not path.startswith(SHARED):
            return route
        return route._replace(handler=self._shared(route.handler, method, path))

    async def _state(self, parameter: str, body: bytes) -> Response:
        """What was changed at run time, for a process that starts."""
        gateway = self.gateway
        workers = [
            {name: getattr(worker, name) for name in ("url", "api_key", "source", "bootstrap_port", "draining")}
            for worker in gateway.registry
        ]
        policies = {model: dataclasses.asdict(choice) for model, choice in gateway.policies.chosen.items()}
        default = dataclasses.asdict(gateway.policies.default)
        return json_response({"workers": workers, "policies": policies, "default": default})

    async def catch_up(self) -> None:
        answer = await self._group.ask(0, "GET", STATE) if self._group.number else None
        if answer is None:
            return
        gateway = self.gateway
        state = json.loads(answer.body)
        urls = {known["url"] for known in state["workers"]}
        for worker in gateway.registry:
            if worker.url not in urls and worker.source != DISCOVERED:  # it was removed at run time
                gateway.registry.remove(worker)
        for known in state["workers"]:
            worker = gateway.registry.add(*(known[name] for name in ("url", "api_key", "source", "bootstrap_port")))
            gateway.registry.drain(worker, known["draining"])
        gateway.policies.set_default(PolicyChoice(**state["default"]))
        for model, choice in state["policies"].items():
            gateway.policies.choose(model, PolicyChoice(choice["name"], choice["options"]))

    def _shared(self, handler: Handler, method: str, path: str) -> Handler:
        async def pass_on(parameter: str, body: bytes) -> Response:
            answer = await self._group.ask(0, method, path, body)
            if answer is None:
                message = "The gateway's first process does not answer; try again."
                raise HttpError(503, message, "ServiceUnavailableError")
            return answer

        async def answer_for_all(parameter: str, body: bytes) -> Response:
            answer = await handler(parameter, body)
            if answer.status >= 400:
                return answer
            if method in ("GET", "HEAD"):
                return merged(path, [answer, *await self._group.ask_others("GET", path)])
            if not path.endswith("/restart"):  # engines are the first process's
                await self._group.ask_others(method, path, body)
            return answer

        return pass_on if self._group.number else answer_for_all


def merged(path: str, answers: Sequence[Response]) -> Response:
    """Adds up the counts of all processes. A worker is healthy when all find it so; everything else is the first's."""
    first = answers[0]
    if path == "/metrics":
        return Response(first.status, first.headers, merged_pages([answer.body.decode() for answer in answers]))
    contents = [json.loads(answer.body) for answer in answers if answer.status == 200]
    of_all: dict[str, list[dict[str, Any]]] = {}
    for worker in (worker for content in contents for worker in _workers(content)):
        of_all.setdefault(worker["id"], []).append(worker)
    for worker in _workers(contents[0]):
        found = of_all[worker["id"]]
        worker["load"] = sum(one["load"] for one in found)
        worker["is_healthy"] = all(one["is_healthy"] for one in found)
    return json_response(contents[0], first.status)


def _workers(content: Any) -> list[dict[str, Any]]:
    found = content.get("workers", [content] if "load" in content else [])
    return found if isinstance(found, list) else []


async def end_process(process: asyncio.subprocess.Process, grace_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class ChildProcesses:
    def __init__(
        self, settings: GatewaySettings, listener_fd: int, folder: Path, launched: tuple[tuple[str, str], ...]
    ) -> None:
        self._settings = json.dumps(dataclasses.asdict(dataclasses.replace(settings, launched=launched, launch=0)))
        self._fd = listener_fd
        self._folder = folder
        self._drain_s = settings.drain_timeout_s
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ending: list[asyncio.Task[None]] = []
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(1, settings.processes)]

    async def close(self) -> None:
        self.terminate()
        await cancel_all(self._tasks)
        await asyncio.gather(*self._ending)

    def terminate(self) -> None:
        """Lets them drain. Each gets one signal, however often this is called: a second would end it at once."""
        for task in self._tasks:
            task.cancel()
        grace_s = self._drain_s + ASK_TIMEOUT_S
        self._ending += [asyncio.create_task(end_process(each, grace_s)) for each in self._processes.values()]
        self._processes.clear()

    async def _keep(self, number: int) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "bough.gateway.service", str(number), str(self._fd), str(self._folder),
                stdin=asyncio.subprocess.PIPE, pass_fds=(self._fd,), start_new_session=True,
                env=child_environment(),
            )  # fmt: skip
            self._processes[number] = process
            assert process.stdin is not None
            process.stdin.write(self._settings.encode() + b"\n")  # stays open: its end ends the child
            code = await process.wait()
            log.error("gateway process %d has ended with %s and is started again", number, code)
            await asyncio.sleep(RESTART_PAUSE_S)

"""`bough gateway` with real processes: engines that it starts, a rolling restart, its own end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from aiohttp import web

from bough.gateway.launching import free_ports
from bough.sampling.custom_logit_processor import CustomLogitProcessor
from tests.fakes.workers import FakeWorker, workers
from tests.system.gateways import PATIENCE_S, GatewayProcess, running_gateway
from tests.system.serving import TINY, running, until

ENGINE = (*TINY, "--log-level", "warning")
BODY: dict[str, Any] = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True},
    "stream": True,
}


def stream(gateway: GatewayProcess) -> list[int]:
    raw = httpx.post(f"{gateway.url}/generate", json=BODY, timeout=PATIENCE_S).text
    blocks = [block.removeprefix("data: ") for block in raw.split("\n\n") if block]
    assert blocks[-1] == "[DONE]", raw[-300:]
    ids: list[int] = json.loads(blocks[-2])["output_ids"]
    return ids


def answered(url: str) -> float:
    """Requests that all processes have counted; without the model in a process that does not know it yet."""
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    return sum(map(float, re.findall(r'^bough_gateway_requests_total{.*,status="200"} (\S+)$', page, re.MULTILINE)))


@pytest.mark.slow
def test_a_rolling_restart_fails_no_request_and_no_engine_survives(tiny_model: Path) -> None:
    flags = ("--launch", "2", "--health-check-interval-secs", "1")
    with running_gateway(*flags, "--", str(tiny_model), *ENGINE) as gateway:
        gateway.wait_for(2)
        expected = stream(gateway)
        before = {worker["pid"] for worker in gateway.workers()}
        rolled = threading.Event()
        wrong: list[Any] = []

        def load() -> None:
            while not rolled.is_set():
                try:
                    ids = stream(gateway)
                except (httpx.HTTPError, AssertionError, ValueError) as error:
                    wrong.append(error)
                    return
                if ids != expected:
                    wrong.append(ids)

        clients = [threading.Thread(target=load) for _ in range(3)]
        for client in clients:
            client.start()
        words = [sys.executable, "-m", "bough.cli.main", "gateway", "roll", "--url", gateway.url]
        result = subprocess.run(words, capture_output=True, text=True, timeout=300)
        rolled.set()
        for client in clients:
            client.join()
        assert result.returncode == 0, result.stderr
        assert not wrong
        assert not before & {worker["pid"] for worker in gateway.workers()}
        family = psutil.Process(gateway.process.pid).children(recursive=True)
        assert gateway.stop() == 0
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive


def test_engines_end_with_a_gateway_that_is_killed(tiny_model: Path) -> None:
    with running_gateway("--launch", "1", "--", str(tiny_model), *ENGINE) as gateway:
        until(lambda: gateway.workers()[0]["pid"], "an engine that starts")
        engine = psutil.Process(gateway.workers()[0]["pid"])
        gateway.process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs([engine], timeout=PATIENCE_S)
        assert not alive


def test_engines_that_cannot_start_end_the_gateway() -> None:
    words = [sys.executable, "-m", "bough.cli.main", "gateway", "--port", "0", "--launch", "2", "--", "/nosuch"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert "/nosuch" in ended.stderr and "ended with exit code 1" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_several_processes_look_like_one(tiny_model: Path) -> None:
    flags = ("--launch", "1", "--processes", "2", "--health-check-interval-secs", "1")
    with running_gateway(*flags, "--", str(tiny_model), *ENGINE) as gateway:
        gateway.wait_for(1)
        until(lambda: httpx.get(f"{gateway.url}/readiness").status_code == 200, "a ready gateway")
        for _ in range(10):
            stream(gateway)
        until(lambda: answered(gateway.url) == 10, "all requests counted")
        httpx.post(f"{gateway.url}/workers", json={"url": "http://127.0.0.1:9"})
        until(lambda: all(len(gateway.workers()) == 2 for _ in range(6)), "the worker known to both")
        assert gateway.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_engines_die_of_leaves_the_third_alone(tiny_model: Path, streams: bool) -> None:
    pytest.importorskip("dill")

    class Deadly(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            import os

            os._exit(1)

    flags = (str(tiny_model), *ENGINE, "--api-key", "k", "--enable-custom-logit-processor")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(*flags)) for _ in range(3)]
        urls = [server.url for server in servers]
        gateway = stack.enter_context(running_gateway("--worker-urls", *urls, "--worker-api-key", "k"))
        gateway.wait_for(3)
        body = BODY | {"custom_logit_processor": Deadly.to_str(), "stream": streams}
        answer = httpx.post(f"{gateway.url}/generate", json=body, timeout=PATIENCE_S)
        assert "not tried on a third worker" in answer.text and (streams or answer.status_code == 500)
        until(lambda: sum(server.process.poll() is not None for server in servers) == 2, "two engines that have ended")
        assert len(stream(gateway)) == 30
        assert "bough_gateway_poison_requests_total 1.0" in httpx.get(f"{gateway.url}/metrics").text


@pytest.mark.slow
def test_metrics_of_all_processes_have_a_port_of_their_own(tiny_model: Path) -> None:
    (port,) = free_ports(1)
    flags = ("--processes", "2", "--prometheus-port", str(port), "--prometheus-host", "127.0.0.1")
    with running(str(tiny_model), *ENGINE) as server, running_gateway(*flags, "--worker-urls", server.url) as gateway:
        gateway.wait_for(1)
        for _ in range(10):
            stream(gateway)

        until(lambda: answered(f"http://127.0.0.1:{port}") == 10, "all requests counted")
        assert httpx.get(f"http://127.0.0.1:{port}/workers").status_code == 404


class Held(FakeWorker):
    """Answers when it is told to."""

    release: asyncio.Event

    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        await self.release.wait()
        return await super()._work(request, path, body)


def connections(process: psutil.Process, port: int, status: str) -> list[Any]:
    return [each for each in process.net_connections() if each.laddr.port == port and each.status == status]


@dataclass
class Asked:
    """A request of its own connection, so that it is known which process has it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def of(cls, port: int) -> Asked:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "p", "max_tokens": 8, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())
        return cls(reader, writer)

    @property
    def port(self) -> int:
        port: int = self.writer.get_extra_info("sockname")[1]
        return port

    async def is_whole(self) -> bool:
        said = (await self.reader.read()).decode()
        return "200 OK" in said and "data: [DONE]" in said and said.endswith("0\r\n\r\n")


@contextlib.asynccontextmanager
async def two_processes(*flags: str) -> AsyncIterator[tuple[GatewayProcess, psutil.Process, Held]]:
    worker = Held()
    worker.release = asyncio.Event()
    async with workers(worker):
        with running_gateway("--processes", "2", *flags, "--worker-urls", worker.url) as gateway:
            await asyncio.to_thread(gateway.wait_for, 1)
            (child,) = await asyncio.to_thread(until, psutil.Process(gateway.process.pid).children, "a child")
            try:
                yield gateway, child, worker
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


async def ask_both(port: int, child: psutil.Process, worker: Held) -> tuple[list[Asked], list[Asked]]:
    """Requests that the first process has, and those of the second: the kernel chooses who accepts."""
    await asyncio.to_thread(
        until, lambda: connections(child, port, psutil.CONN_LISTEN), "a second process that listens"
    )
    asked: list[Asked] = []
    while True:
        ports = {each.raddr.port for each in connections(child, port, psutil.CONN_ESTABLISHED)}
        if worker.running == len(asked) and ports and len(ports) < len(asked):
            return [each for each in asked if each.port not in ports], [each for each in asked if each.port in ports]
        if worker.running == len(asked):
            asked.append(await Asked.of(port))
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("grpc", [False, True])
def test_the_port_is_free_as_soon_as_the_first_process_is_killed(grpc: bool) -> None:
    """The others finish what they hold, and a gateway in its place serves meanwhile."""
    port, grpc_port = free_ports(2)
    if grpc:
        pytest.importorskip("grpc")
    flags = ["--drain-timeout-s", "600", "--port", str(port), *(["--grpc-port", str(grpc_port)] if grpc else [])]

    async def story() -> None:
        async with two_processes(*flags) as (first, child, worker):
            _, held = await ask_both(port, child, worker)
            first.process.kill()
            await asyncio.to_thread(until, lambda: not listening(child), "ports that are left")
            with running_gateway(*flags, "--worker-urls", worker.url) as second:
                await asyncio.to_thread(second.wait_for, 1)
                assert child.is_running()  # it still holds its requests
                held.append(await Asked.of(port))
                worker.release.set()
                assert all([await each.is_whole() for each in held])
                await asyncio.to_thread(psutil.wait_procs, [child], PATIENCE_S)
                assert not child.is_running()
                assert second.stop() == 0

    def listening(child: psutil.Process) -> list[Any]:
        return [each for number in (port, grpc_port) for each in connections(child, number, psutil.CONN_LISTEN)]

    asyncio.run(story())


def test_a_first_process_without_requests_waits_for_those_of_the_others() -> None:
    (port,) = free_ports(1)

    async def story() -> None:
        async with two_processes("--drain-timeout-s", "600", "--port", str(port)) as (first, child, worker):
            mine, held = await ask_both(port, child, worker)
            first.process.terminate()
            for each in mine:
                each.writer.close()
            await asyncio.to_thread(until, lambda: not answers_others(first), "a first process that is done")
            await asyncio.sleep(1.0)  # for anything that it might do to the other now
            worker.release.set()
            assert all([await each.is_whole() for each in held])
            assert await asyncio.to_thread(first.process.wait, PATIENCE_S) == 0

    def answers_others(gateway: GatewayProcess) -> bool:
        """Whether it has the socket on which the other processes call it, until it has drained."""
        sockets = psutil.Process(gateway.process.pid).net_connections("unix")
        return any(str(each.laddr).endswith("/0.sock") for each in sockets)

    asyncio.run(story())

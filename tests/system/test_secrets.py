"""Keys of a real server and a real gateway are in no log, answer, trace or process list, however they were given."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.workers import FakeWorker, workers
from tests.system.gateways import PATIENCE_S, running_gateway
from tests.system.serving import TINY, running, until

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

KEYS = {"api_key": "client-secret-4f1c", "admin_api_key": "admin-secret-9d2e"}
WORKER_KEY = {"worker_api_key": "worker-secret-77ab"}
WRONG = "wrong-secret-31c8"
WAYS = ("flag", pytest.param("variable", marks=pytest.mark.slow), pytest.param("file", marks=pytest.mark.slow))


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Where traces go, and what has come."""
    came: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(str(self.headers).encode() + self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()


def given(way: str, prefix: str, keys: dict[str, str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Flags and variables that give the keys in this way."""
    if way == "variable":
        return [], {prefix + name.upper(): key for name, key in keys.items()}
    if way == "file":
        file = folder / "config.yaml"
        listed = {name if name != "api_key" or "GATEWAY" not in prefix else "api_keys": k for name, k in keys.items()}
        lines = [f"{name}: [{key}]" if name == "api_keys" else f"{name}: {key}" for name, key in listed.items()]
        file.write_text("\n".join(lines))
        return ["--config", str(file)], {}
    (first, key), *others = ((f"--{name.replace('_', '-')}", key) for name, key in keys.items())
    return [first, key, *(f"{flag}={key}" for flag, key in others)], {}


def command_lines(root: int) -> dict[int, str]:
    found = {}
    process = psutil.Process(root)
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[each.pid] = Path(f"/proc/{each.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def call_all(url: str) -> str:
    """Everything that the server answers to keys that are right, wrong and in the wrong place."""
    bodies = [{"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}, {"input_ids": "no list"}]
    said = []
    for key in (KEYS["api_key"], KEYS["admin_api_key"], WRONG, None):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        for path in ("/generate", "/v1/completions", "/flush_cache", "/nothing"):
            said += [httpx.post(f"{url}{path}", json=body, headers=headers, timeout=PATIENCE_S) for body in bodies]
        for path in ("/server_info", "/get_server_info", "/v1/models", "/workers", "/metrics", "/openapi.json"):
            said.append(httpx.get(f"{url}{path}", headers=headers, timeout=PATIENCE_S))
    assert {response.status_code for response in said} >= {200, 401, 404}
    return "".join(f"{response.headers} {response.text}" for response in said)


def assert_nowhere(secrets: list[str], places: dict[str, str]) -> None:
    for name, text in places.items():
        assert text.strip(), f"nothing was looked at: {name}"
        for secret in secrets:
            where = text.find(secret)
            assert where < 0, f"{secret} in {name}: {text[max(0, where - 200) : where + 50]}"


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="command lines are read from Linux's /proc")
@pytest.mark.parametrize("way", WAYS)
def test_a_server_never_shows_its_keys(way: str, tiny_model: Path, tmp_path: Path) -> None:
    flags, variables = given(way, "BOUGH_", KEYS, tmp_path)
    with collector() as (traces, came):
        more = ("--log-level", "debug", "--log-requests", "--log-requests-level", "3", "--otlp-endpoint", traces)
        with running(str(tiny_model), *TINY, *more, *flags, variables=variables) as server:
            said = call_all(server.url)
            lines = command_lines(server.process.pid)
            assert len(lines) >= 3 and ("***" in lines[server.process.pid]) == (way == "flag")
            until(lambda: came, "traces")
            server.process.terminate()
            server.wait()
            places = {"log": server.log(), "welcome": server.welcome, "answers": said, "ps": " ".join(lines.values())}
        assert_nowhere([*KEYS.values(), WRONG], {**places, "traces": b"".join(came).decode("latin-1")})


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="command lines are read from Linux's /proc")
@pytest.mark.parametrize("way", WAYS)
def test_a_gateway_never_shows_its_keys(way: str, tmp_path: Path) -> None:
    flags, variables = given(way, "BOUGH_GATEWAY_", {**KEYS, **WORKER_KEY}, tmp_path)

    async def story() -> None:
        worker = FakeWorker(api_key=WORKER_KEY["worker_api_key"])
        with collector() as (traces, came):
            more = ("--processes", "2", "--log-level", "debug", "--access-log", "--otlp-endpoint", traces)
            async with workers(worker):
                words = (*more, *flags, "--worker-urls", worker.url)
                with running_gateway(*words, variables=variables) as gateway:
                    ready = f"{gateway.url}/readiness"
                    await asyncio.to_thread(until, lambda: httpx.get(ready).status_code == 200, "a worker")
                    said = await asyncio.to_thread(call_all, gateway.url)
                    lines = command_lines(gateway.process.pid)
                    assert len(lines) >= 2 and ("***" in lines[gateway.process.pid]) == (way == "flag")
                    await asyncio.to_thread(until, lambda: came, "traces")
                    await asyncio.to_thread(gateway.stop)
                    places = {"log": gateway.log(), "answers": said, "ps": " ".join(lines.values())}
        secrets = [*KEYS.values(), *WORKER_KEY.values(), WRONG]
        assert_nowhere(secrets, {**places, "traces": b"".join(came).decode("latin-1")})
        assert worker.requests  # the key was used

    asyncio.run(story())

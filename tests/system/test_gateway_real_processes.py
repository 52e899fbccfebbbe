"""`bough gateway` with real processes: engines that it starts, a rolling restart, its own end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.system.gateways import PATIENCE_S, GatewayProcess, running_gateway
from tests.system.serving import TINY, until

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
    words = [sys.executable, "-m", "bough.cli.main", "gateway", "--port", "0", "--launch", "2", "--", "--nosuch"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert "unknown flag --nosuch" in ended.stderr and "ended with exit code 2" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_several_processes_look_like_one(tiny_model: Path) -> None:
    flags = ("--launch", "1", "--processes", "2", "--health-check-interval-secs", "1")
    with running_gateway(*flags, "--", str(tiny_model), *ENGINE) as gateway:
        gateway.wait_for(1)
        until(lambda: httpx.get(f"{gateway.url}/readiness").status_code == 200, "a ready gateway")
        for _ in range(10):
            stream(gateway)
        counted = 'path="/generate",status="200"} 10.0'
        until(lambda: counted in httpx.get(f"{gateway.url}/metrics").text, "all requests counted")
        httpx.post(f"{gateway.url}/workers", json={"url": "http://127.0.0.1:9"})
        until(lambda: all(len(gateway.workers()) == 2 for _ in range(6)), "the worker known to both")
        assert gateway.stop() == 0

"""A server as a user starts it, on a free port; always ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

PATIENCE_S = 120.0
TINY = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-total-tokens", "4096", "--cpu-threads", "1")


class Server:
    """One `bough serve`; standard error goes to a file, so that nobody has to read it."""

    def __init__(self, folder: Path, *flags: str, port: int = 0, variables: Mapping[str, str] = {}) -> None:
        self.errors = folder / f"stderr-{time.monotonic_ns()}"
        words = [sys.executable, "-m", "bough.cli.main", "serve", "--port", str(port), *flags]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BOUGH_")}
        home = os.environ.get("BOUGH_HOME")
        environ |= {**({"BOUGH_HOME": home} if home else {}), **variables}
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ)
        self.welcome = ""
        self.url = ""

    def wait_ready(self) -> None:
        """The ready line and the call to paste."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline(), self.process.stdout.readline()]
        self.welcome = "".join(lines)
        found = re.search(r"served at (\S+)", self.welcome)
        assert found, f"the server did not start: {self.welcome}{self.log()}"
        self.url = found[1]

    def log(self) -> str:
        return self.errors.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, role: str) -> psutil.Process:
        return next(p for p in self.children() if f"bough::{role}" in " ".join(p.cmdline()))

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        processes = self.children() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def running(*flags: str, ready: bool = True, variables: Mapping[str, str] = {}) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), *flags, variables=variables)
        try:
            if ready:
                server.wait_ready()
            yield server
        finally:
            server.end()


def until(condition: Callable[[], Any], what: str) -> Any:
    """Waits for something that must come to be."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.05)
    raise AssertionError(f"never: {what}")


def until_idle(processes: list[psutil.Process]) -> None:
    """Until they use next to no CPU time, of which a busy loop would use two seconds each time. It does not depend on
    the machine's load."""

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def idle() -> bool:
        before = used()
        time.sleep(2.0)
        return used() - before < 0.2

    until(idle, "processes that burn no CPU")


def load_of(url: str) -> dict[str, Any]:
    load: dict[str, Any] = httpx.get(f"{url}/v1/loads").json()["loads"][0]
    return load

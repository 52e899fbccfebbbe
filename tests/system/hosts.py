"""Hosts to run commands on: network namespaces with a cable between them where this user may make them, else process
groups on loopback. Either way each has folders of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from bough.core.child_environment import child_environment
from tests.system.sockets import tree_of

PATIENCE_S = 120.0
KEY = "a secret of the tests, long enough to be one"
_numbers = itertools.count()


class Node:
    """`bough serve` on one host; it serves on a unix socket, which namespaces do not hide."""

    def __init__(self, host: Host, number: int, flags: list[str], key: str) -> None:
        self.socket = host.folder / f"node{number}"
        self.log = host.folder / f"log{number}"
        command = [sys.executable, "-m", "bough.cli.main", "serve", "--node-rank", str(number), "--uds", self.socket]
        own = {"BOUGH_HOME": str(host.folder / "home"), "TMPDIR": str(host.folder), "BOUGH_CLUSTER_KEY": key}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*host.prefix, *command, *flags], stdout=log, stderr=log, env=child_environment() | own
            )

    def call(self, path: str, **body: Any) -> httpx.Response:
        transport = httpx.HTTPTransport(uds=str(self.socket))
        with httpx.Client(transport=transport, base_url="http://host", timeout=PATIENCE_S) as client:
            return client.post(path, json=body) if body else client.get(path)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.call("/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.log.read_text()}")

    def rank(self, title: str) -> psutil.Process:
        return next(each for each in tree_of(self.process.pid) if " ".join(each.cmdline()).strip() == f"bough::{title}")

    def wait(self) -> tuple[int, str]:
        """Its exit code and what it wrote."""
        return self.process.wait(PATIENCE_S), self.log.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            for each in tree_of(self.process.pid):
                each.kill()
            self.process.wait()


class Host:
    def __init__(self, folder: Path, address: str, prefix: list[str]) -> None:
        folder.mkdir()
        self.folder, self.address, self.prefix = folder, address, prefix


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    number = next(_numbers)
    names = [f"bough{os.getpid()}x{number}{side}" for side in "ab"]
    addresses = ["10.213.77.1", "10.213.77.2"]
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))  # names of sockets must be short
        namespaces = shutil.which("ip") is not None
        for name in names if namespaces else ():
            namespaces = namespaces and _ip("netns", "add", name)
            if namespaces:
                cleanup.callback(_ip, "netns", "del", name)
        link = [f"bt{os.getpid() % 100000}{number % 100}{side}" for side in "ab"]
        if namespaces:
            ends = zip(names, link, addresses, strict=True)
            made = _ip("link", "add", link[0], "netns", names[0], "type", "veth", "peer", link[1], "netns", names[1])
            namespaces = made and all(
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
                and _ip("-n", name, "link", "set", card, "up")
                and _ip("-n", name, "link", "set", "lo", "up")
                for name, card, address in ends
            )
        if namespaces:
            prefixes = [["ip", "netns", "exec", name] for name in names]
        else:
            prefixes, addresses = [[], []], ["127.0.0.1"] * 2
        made_hosts = zip(names, addresses, prefixes, strict=True)
        yield [Host(folder / name, address, prefix) for name, address, prefix in made_hosts]


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

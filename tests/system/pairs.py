"""Prefill engines, a decode engine and their gateway as a user starts them, all at once; always ended."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.system.gateways import GatewayProcess
from tests.system.serving import Server


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Fleet:
    prefills: list[Server]
    decode: Server
    gateway: GatewayProcess

    def logs(self) -> str:
        return "\n".join(each.log() for each in (*self.prefills, self.decode, self.gateway))


@contextlib.contextmanager
def fleet(*flags: str, backends: tuple[str, ...] = ("shm", "tcp")) -> Iterator[Fleet]:
    """A prefill engine for each transport, and a decode engine that takes any."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as cleanup:
        folder, ports = Path(name), [free_port() for _ in backends]
        prefills = []
        for backend, port in zip(backends, ports, strict=True):
            mode = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", backend)
            prefills.append(Server(folder, *flags, *mode, "--disaggregation-bootstrap-port", str(port)))
            cleanup.callback(prefills[-1].end)
        decode = Server(folder, *flags, "--disaggregation-mode", "decode")
        cleanup.callback(decode.end)
        for server in (*prefills, decode):
            server.wait_ready()
        words = ["--pd-disaggregation", "--decode", decode.url, "--prefill-policy", "round_robin"]
        for server, port in zip(prefills, ports, strict=True):
            words += ["--prefill", server.url, str(port)]
        gateway = GatewayProcess(folder, *words)
        cleanup.callback(gateway.process.kill)
        gateway.wait_for(len(prefills) + 1)
        yield Fleet(prefills, decode, gateway)

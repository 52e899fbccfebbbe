"""Prefill engines, decode engines and their gateway as a user starts them, all at once; always ended."""

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
    decodes: list[Server]
    gateway: GatewayProcess
    port: int  # where the first prefill engine meets decode engines

    def logs(self) -> str:
        return "\n".join(each.log() for each in (*self.prefills, *self.decodes, self.gateway))


# A worker that does not answer is soon noticed, and asked again as soon as it does.
WATCHFUL = ("--health-check-interval-secs", "1", "--health-failure-threshold", "2", "--cb-failure-threshold", "1000")


@contextlib.contextmanager
def fleet(*flags: str, backends: tuple[str, ...] = ("shm", "tcp"), decode: str = "auto") -> Iterator[Fleet]:
    """A prefill engine for each transport, and two decode engines, which take any with `auto`; the first prefill engine
    is that of the second one's own choice."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as cleanup:
        folder, ports = Path(name), [free_port() for _ in backends]

        def start(*mode: str) -> Server:
            server = Server(folder, *flags, "--disaggregation-mode", *mode)
            cleanup.callback(server.end)
            return server

        port_flag, backend_flag = "--disaggregation-bootstrap-port", "--disaggregation-transfer-backend"
        prefills = [
            start("prefill", backend_flag, backend, port_flag, str(port))
            for backend, port in zip(backends, ports, strict=True)
        ]
        home = "--prefill-url", "http://127.0.0.1:1", port_flag, str(ports[0])
        decodes = [start("decode", backend_flag, decode, *more) for more in ((), home)]
        for server in (*prefills, *decodes):
            server.wait_ready()
        words = [*WATCHFUL, "--pd-disaggregation", "--prefill-policy", "round_robin", "--decode-policy", "round_robin"]
        for server, port in zip(prefills, ports, strict=True):
            words += ["--prefill", server.url, str(port)]
        for server in decodes:
            words += ["--decode", server.url]
        gateway = GatewayProcess(folder, *words)
        cleanup.callback(gateway.end)
        gateway.wait_for(len(prefills) + len(decodes))
        yield Fleet(prefills, decodes, gateway, ports[0])

"""A scan of everything that a real gateway and its engine listen on: what docs/security.md lists, and nothing else. An
engine with cache events over TCP is scanned in `test_gateway_kv_events.py`, where one runs already."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from bough.gateway.launching import free_ports
from tests.system.gateways import running_gateway
from tests.system.serving import TINY, until
from tests.system.sockets import (
    LOOPBACK,
    inet_listeners,
    port_of,
    private_names,
    reached_from_outside,
    tree_of,
    unix_listeners,
)

pytestmark = pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="sockets are read from Linux's /proc")


@pytest.mark.slow
def test_a_gateway_and_its_engine_listen_on_loopback_and_in_private_folders_alone(tiny_model: Path) -> None:
    (grpc_port,) = free_ports(1)
    flags = ("--launch", "1", "--policy", "kv_events", "--processes", "2", "--grpc-port", str(grpc_port))
    with running_gateway(*flags, "--", str(tiny_model), *TINY) as gateway:
        gateway.wait_for(1)
        until(lambda: "1.sock" in private_names(tree_of(gateway.process.pid)), "the second process")
        processes = tree_of(gateway.process.pid)
        engine = gateway.workers()[0]["url"]
        ports = {port_of(gateway.url), port_of(engine), grpc_port}
        assert inet_listeners(processes) == {(LOOPBACK, port) for port in ports}
        assert not reached_from_outside(ports)
        engine_names = {"scheduler", "detokenizer", "client0", "0.events", "0.replays"}
        assert private_names(processes) == {"0.sock", "1.sock", "http.sock"} | engine_names
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        assert httpx.post(f"{engine}/generate", json=body).status_code == 401
        assert all(httpx.post(f"{gateway.url}/generate", json=body).status_code == 200 for _ in range(8))


def test_the_scan_finds_what_is_open(tmp_path: Path) -> None:
    here = [psutil.Process()]
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as open_to_all,
    ):
        port = everywhere.getsockname()[1]
        assert ("0.0.0.0", port) in inet_listeners(here)
        has_network = any(not address.startswith("127.") for address in own_addresses())
        assert bool(reached_from_outside({port})) == has_network
        datagrams.bind(("0.0.0.0", 0))
        assert datagrams.getsockname() in inet_listeners(here)
        for each, name in ((abstract, f"\0bough-test-{os.getpid()}"), (open_to_all, str(tmp_path / "open"))):
            each.bind(name)
            each.listen()
        assert {f"@bough-test-{os.getpid()}", str(tmp_path / "open")} <= unix_listeners(here)
        tmp_path.chmod(0o755)
        with pytest.raises(AssertionError):
            private_names(here)


def own_addresses() -> list[str]:
    cards = psutil.net_if_addrs().values()
    return [each.address for card in cards for each in card if each.family == socket.AF_INET]

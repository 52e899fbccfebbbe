"""How ranks of several hosts choose the interface between them."""

from __future__ import annotations

import socket

import psutil

from bough.distributed.group import LOOPBACK, interface_to


def test_the_interface_is_the_one_towards_the_first_host() -> None:
    assert interface_to("tcp://127.0.0.1:1") == LOOPBACK
    assert interface_to("tcp://[::1]:1") == LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                assert interface_to(f"tcp://{address.address}:1") in (name, LOOPBACK)  # an own address may be loopback

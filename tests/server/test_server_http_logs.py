"""What the HTTP library has to say stands in the log like everything else, and strangers cannot make it speak."""

from __future__ import annotations

import logging
import re
import socket
from urllib.parse import urlsplit

import pytest

from bough.observability.logs import set_up_logging
from tests.bench.bench_server import bench_server

UPGRADE = (
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: eA==\r\n\r\n"
)


def test_its_errors_have_our_form_and_its_advice_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("server", "info")
    with bench_server() as server:
        address = urlsplit(server.url)
        for nonsense in (UPGRADE, b"nonsense\r\n\r\n"):
            with socket.create_connection((address.hostname, address.port or 0)) as client:
                client.sendall(nonsense)
                assert client.recv(4096).startswith(b"HTTP/1.1 ")
        logging.getLogger("uvicorn.error").error("broken")
    assert re.fullmatch(r"\d\d:\d\d:\d\d E server: broken\n", capsys.readouterr().err)

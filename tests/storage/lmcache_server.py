"""LMCache's own server, where its program is in the path, or beside this Python."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def lmcache_server(folder: Path) -> Iterator[str]:
    """Its address; skips the test without it."""
    program = shutil.which("lmcache_server") or shutil.which("lmcache_server", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("no lmcache_server on this machine")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with (folder / "lmcache.log").open("wb") as log:
        server = subprocess.Popen([program, "127.0.0.1", str(port)], stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 300  # it imports torch
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    try:
        yield f"lm://127.0.0.1:{port}"
    finally:
        server.kill()  # it waits for its clients otherwise
        server.wait(30)

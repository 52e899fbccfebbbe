"""A further process of `bough gateway --processes N`: `python -m bough.gateway.child NUMBER FD FOLDER`.

Its settings come as a line of JSON on standard input, which stays open: when it ends, the first process has gone, and
this one goes too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from bough.core.errors import BoughError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.processes import ProcessGroup
from bough.gateway.service import serve
from bough.observability.logs import set_up_logging

log = logging.getLogger(__name__)


def main() -> None:
    number, fd, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = msgspec.json.decode(sys.stdin.readline(), type=GatewaySettings)
    set_up_logging(f"gateway {number}", settings.log_level)
    listener = socket.socket(fileno=fd)
    uvloop.run(_serve(settings, listener, ProcessGroup(folder, number, settings.processes)))


async def _serve(settings: GatewaySettings, listener: socket.socket, group: ProcessGroup) -> None:
    watching = asyncio.create_task(asyncio.to_thread(_leave_with_parent))
    code = 0
    try:
        await serve(settings, listener, lambda url: None, group)
    except BoughError as error:
        log.error("%s", error)
        code = 1
    watching.cancel()
    os._exit(code)  # the thread that watches for the parent's end is still reading


def _leave_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()

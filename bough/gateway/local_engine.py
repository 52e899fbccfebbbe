"""One engine on this machine as a process: started as a command, asked to end, made to end.

Owns the process. When it is started and whether it is started again is `launching`'s matter.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import sys
from collections.abc import Callable

from bough.core.child_environment import child_environment
from bough.gateway.worker import Worker

log = logging.getLogger(__name__)

GRACE_S = 10.0  # for an engine that was told to end and has nothing to do any more
KEY_VARIABLES = ("BOUGH_API_KEY", "BOUGH_ADMIN_API_KEY")
PR_SET_PDEATHSIG = 1  # of prctl(2): a signal for a child whose parent has died


class LocalEngine:
    """One engine and its process."""

    def __init__(self, number: int, worker: Worker, command: Callable[[int], tuple[list[str], dict[str, str]]]) -> None:
        self.number = number
        self.worker = worker
        self.process: asyncio.subprocess.Process | None = None
        self.replacing = asyncio.Event()  # its end is wanted: it is to be started again without a pause
        self.in_replacement = False
        self.keeping: asyncio.Task[None] | None = None  # starts it again and again
        self._command = command

    @property
    def holds_memory(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        words, environment = self._command(self.number)
        log.info("engine %d starts at %s", self.number, self.worker.url)
        self.process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={**_plain_environment(), **environment},
            start_new_session=True,  # Ctrl-C in a terminal reaches the gateway alone, which ends its engines in order
            preexec_fn=_die_with_parent,
        )
        self.worker.pid = self.process.pid

    async def end(self, grace_s: float = GRACE_S) -> None:
        """Asks it to end, and makes it."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _plain_environment() -> dict[str, str]:
    """Without keys that are meant for a server that the user runs: the gateway knows only the one it gives."""
    return {name: value for name, value in child_environment().items() if name not in KEY_VARIABLES}


def _die_with_parent() -> None:
    """In the child: whatever ends the gateway ends it too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

"""What a process that runs a module of this package begins with, and ends with: its parent's environment and end."""

import gc
import os
import signal
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path

TITLE = "bough::"  # of an engine's processes, before their role


def child_environment() -> dict[str, str]:
    """The caller's environment, with the way to this very package: the caller may have found it by its own path."""
    home = str(Path(__file__).resolve().parents[2])
    if home == sysconfig.get_path("purelib"):  # found anyway, and before the standard library it could hide modules
        return dict(os.environ)
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{given}" if given else home}


def leave_with_parent(leave: Callable[[str], None] = lambda reason: os.kill(os.getpid(), signal.SIGTERM)) -> None:
    """Ends this process, in order if nothing else is given, when its standard input does: the parent has closed it, or
    is gone. The reason comes last there, if the parent has one."""

    def follow() -> None:
        # From the descriptor: the buffered reader's lock would be held here when the interpreter shuts down.
        reason = b""
        while part := os.read(0, 4096):
            reason += part
        leave(reason.decode())

    threading.Thread(target=follow, daemon=True).start()


def settle_garbage() -> None:
    """Called when a process is ready. What lives then (modules, tokenizer, model) lives for good; a full collection
    would look through all of it again and again and hold up every stream for about 15 ms."""
    gc.collect()
    gc.freeze()
    gc.enable()

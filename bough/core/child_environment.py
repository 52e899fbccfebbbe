"""What a process that runs a module of this package has of its parent: the environment, and its end."""

from __future__ import annotations

import os
import signal
import sysconfig
import threading
from pathlib import Path

TITLE = "bough::"  # of an engine's processes, before their role


def child_environment() -> dict[str, str]:
    """The caller's environment, with the way to this very package: the caller may have found it by its own path."""
    home = str(Path(__file__).resolve().parents[2])
    if home == sysconfig.get_path("purelib"):  # found anyway, and before the standard library it could hide modules
        return dict(os.environ)
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{given}" if given else home}


def leave_with_parent() -> None:
    """Ends this process in order when its standard input does: the parent has closed it, or is gone."""

    def follow() -> None:
        # From the descriptor: the buffered reader's lock would be held here when the interpreter shuts down.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()

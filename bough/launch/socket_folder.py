"""The folder in which the sockets of one engine lie.

Its name tells whose it is, because an owner that was killed cannot remove it: the next engine of the same user does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

PREFIX = "bough-"
NAME = re.compile(rf"{PREFIX}(\d+)-\w+")


def open_socket_folder(cleanup: contextlib.ExitStack) -> Path:
    """A new folder, private to the user: whoever can open the sockets can use the engine. It goes with `cleanup`."""
    sweep_dead_owners()
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def sweep_dead_owners() -> None:
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            match = NAME.fullmatch(entry.name)
            if match and _is_ours(entry) and not _is_alive(int(match[1])):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:  # another engine has just swept it
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True

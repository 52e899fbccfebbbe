"""The folders of an engine's sockets, which are removed with it, or by the next engine where it was killed."""

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

from bough.core.files import SHARED

FOLDER_PREFIX = "bough-"
FOLDER_NAME = re.compile(rf"{FOLDER_PREFIX}(\d{{1,9}})-\w+")  # its owner: one that was killed could not remove it


def open_socket_folder(cleanup: contextlib.ExitStack) -> Path:
    """A new folder, private to the user: a user who can open the sockets can use the engine. It goes with `cleanup`."""
    sweep_dead_owners()
    folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-")
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def sweep_dead_owners() -> None:
    for path in (path for place in (tempfile.gettempdir(), SHARED) for path in Path(place).glob(f"{FOLDER_PREFIX}*")):
        match = FOLDER_NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another engine has just swept it
            ours = stat.S_ISDIR(path.lstat().st_mode) and path.lstat().st_uid == os.getuid()
            if match and ours and not psutil.pid_exists(int(match[1])):
                shutil.rmtree(path, ignore_errors=True)

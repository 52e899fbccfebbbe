"""A file through which processes of one user hand large things over."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHARED = Path("/dev/shm")


@contextlib.contextmanager
def shared_file(nbytes: int) -> Iterator[str]:
    """An empty file that no other user can read, in shared memory where that has room; it is removed afterwards."""
    roomy = SHARED.is_dir() and shutil.disk_usage(SHARED).free > nbytes + (1 << 20)
    with tempfile.NamedTemporaryFile(prefix="bough-", dir=SHARED if roomy else None) as file:
        yield file.name

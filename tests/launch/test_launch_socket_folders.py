"""Folders for sockets: private, removed by their owner, and swept when the owner could not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bough.launch.socket_folders import open_socket_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_is_private_and_goes_with_its_owner(temporary: Path) -> None:
    with contextlib.ExitStack() as cleanup:
        folder = open_socket_folder(cleanup)
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        assert str(os.getpid()) in folder.name
    assert list(temporary.iterdir()) == []


def test_a_folder_that_is_there_already_is_never_taken(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_get_candidate_names", lambda: iter(["guessed", "fresh"]))
    foreign = temporary / f"bough-{os.getpid()}-guessed"
    foreign.mkdir(mode=0o777)
    with contextlib.ExitStack() as cleanup:
        assert open_socket_folder(cleanup).name == f"bough-{os.getpid()}-fresh"
    assert foreign.is_dir()


def test_only_own_folders_of_dead_owners_are_swept(temporary: Path) -> None:
    gone = dead_pid()
    stale = temporary / f"bough-{gone}-abc"
    kept = [temporary / f"bough-{os.getpid()}-abc", temporary / f"other-{gone}-abc", temporary / "bough-notes"]
    for folder in (stale, *kept):
        folder.mkdir()
        (folder / "scheduler").touch()
    target = temporary / "bough-elsewhere"
    target.mkdir()
    link = temporary / f"bough-{gone}-link"
    link.symlink_to(target)
    with contextlib.ExitStack() as cleanup:
        open_socket_folder(cleanup)
    assert not stale.exists() and all((folder / "scheduler").exists() for folder in kept)
    assert link.is_symlink() and target.is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_left_alone(temporary: Path) -> None:
    foreign = temporary / f"bough-{dead_pid()}-abc"
    foreign.mkdir()
    os.chown(foreign, 12345, 12345)
    with contextlib.ExitStack() as cleanup:
        open_socket_folder(cleanup)
    assert foreign.exists()

"""Runs in files: any order of events gives the right bytes or none, and the folder stays within its bound."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.errors import SettingsError
from bough.storage import files as files_module
from bough.storage.backends import open_store
from bough.storage.files import FOLDER_VARIABLES, Files
from bough.storage.store import HEADER, Store
from tests.storage.store_checks import KEYS, SIZE, check_store, content, empty

FILE = HEADER.size + SIZE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLES[0], str(tmp_path / "kv"))
    return tmp_path / "kv"


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != ".lock")


def test_a_folder_of_files_is_a_store(folder: Path) -> None:
    check_store(Store(Files()))
    assert bytes_in(folder) == 0


def test_runs_are_there_after_a_restart(folder: Path) -> None:
    Store(Files()).put(KEYS[:2], [content(0), content(1)])
    buffers = empty(2)
    assert Store(Files()).get(KEYS[:2], buffers) == 2 and np.array_equal(buffers[1], content(1))


def test_nobody_else_may_read_them(folder: Path) -> None:
    Store(Files()).put(KEYS[:1], [content(0)])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o750)
    with pytest.raises(SettingsError, match="chmod 700"):
        open_store("file")


def test_where_files_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path / "home"))
    for variable in FOLDER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert Files().folder == tmp_path / "home" / "kv"
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "theirs"))
    assert Files().folder == tmp_path / "theirs"
    monkeypatch.setenv("BOUGH_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "ours"))
    assert Files().folder == tmp_path / "ours"


def age(files: Files, name: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(files.folder / name, (then, then))


def test_what_was_not_used_for_longest_goes_first(folder: Path) -> None:
    files = Files(max_bytes=4 * FILE)
    store = Store(files)
    store.put(KEYS[:4], [content(number) for number in range(4)])
    for number in range(4):
        age(files, KEYS[number], 100 - number)
    store.get(KEYS[:1], empty(1))
    store.put(KEYS[4:5], [content(4)])
    assert [store.get([key], empty(1)) for key in KEYS[:5]] == [1, 0, 0, 1, 1], "and a tenth of the room is made free"


def test_a_run_larger_than_the_bound_displaces_nothing(folder: Path) -> None:
    store = Store(Files(max_bytes=2 * FILE))
    store.put(KEYS[:2], [content(0), content(1)])
    assert store.put(KEYS[2:3], [content(2, 3 * SIZE)]) == 0
    assert store.get(KEYS[:2], empty(2)) == 2 and store.counts["dropped"] == 1


def test_a_smaller_bound_holds_from_the_start(folder: Path) -> None:
    Store(Files()).put(KEYS, [content(number) for number in range(8)])
    Files(max_bytes=3 * FILE)
    assert bytes_in(folder) == 3 * FILE


@pytest.mark.parametrize("how", ["cut", "longer", "empty", "other", "folder"])
def test_a_damaged_file_is_removed(folder: Path, how: str) -> None:
    store = Store(Files())
    store.put(KEYS[:2], [content(0), content(1)])
    path = folder / KEYS[0]
    whole = path.read_bytes()
    if how == "folder":  # no run, and not for us to remove
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": whole[:-1], "longer": whole + b"x", "empty": b"", "other": b"x" * len(whole)}[how])
    assert store.get(KEYS[:2], empty(2)) == 0
    if how == "folder":
        assert store.counts["failures"] == 1
    else:
        assert not path.exists() and store.counts["corrupt"] == 1
        store.put(KEYS[:1], [content(0)])
        assert store.get(KEYS[:2], empty(2)) == 2


def test_a_renamed_file_is_not_believed(folder: Path) -> None:
    store = Store(Files())
    store.put(KEYS[:1], [content(0)])
    (folder / KEYS[0]).rename(folder / KEYS[1])
    assert store.get(KEYS[1:2], empty(1)) == 0 and store.counts["corrupt"] == 1


class FullFile(io.BytesIO):
    def write(self, *_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["write", "truncate", "rename"])
def test_a_full_disk_drops_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = Store(Files())
    store.put(KEYS[:1], [content(0)])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(files_module, "open", lambda *_: FullFile(), raising=False)
        elif call == "truncate":
            patch.setattr(os, "truncate", full)
        else:
            patch.setattr(Path, "rename", full)
        assert store.put(KEYS[1:2], [content(1)]) == 0
    assert store.counts["dropped"] == store.counts["failures"] == 1
    assert {path.name for path in folder.iterdir()} == {".lock", KEYS[0]}
    assert store.get(KEYS[:1], empty(1)) == 1, "what is there can be read"


def test_a_file_that_is_removed_while_it_is_read_is_read_to_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(Files())
    store.put(KEYS[:1], [content(0)])
    fstat = os.fstat

    def remove_then_look(descriptor: int) -> os.stat_result:
        (folder / KEYS[0]).unlink(missing_ok=True)
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", remove_then_look)
    buffers = empty(1)
    assert store.get(KEYS[:1], buffers) == 1 and np.array_equal(buffers[0], content(0))


def test_what_a_dead_writer_left_is_removed_once_it_is_old(folder: Path) -> None:
    files = Files(max_bytes=2 * FILE)
    (folder / f".{KEYS[0]}.0123").write_bytes(bytes(FILE))
    store = Store(Files(max_bytes=2 * FILE))
    assert store.get(KEYS[:1], empty(1)) == 0
    assert store.put(KEYS[:1], [content(0)]) == 1
    assert store.put(KEYS[1:2], [content(1)]) == 1, "in the place of the run, as the writer may live"
    age(files, f".{KEYS[0]}.0123", files_module.STALE_S + 1)
    assert store.put(KEYS[2:3], [content(2)]) == 1 and bytes_in(folder) <= 2 * FILE
    assert not list(folder.glob(".*.0123"))


def test_what_others_have_put_into_the_folder_stays(folder: Path) -> None:
    """It neither counts nor goes, however old: the variable may name a folder that serves other purposes."""
    (folder / "photos").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    others = [folder / "letter.txt", folder / ".profile", folder / f"{KEYS[0]}.bin"]
    for path in others:
        path.write_bytes(bytes(3 * FILE))
    store = Store(Files(max_bytes=2 * FILE))
    for path in others:
        age(Files(max_bytes=2 * FILE), path.name, files_module.STALE_S + 1)
    assert store.put(KEYS[:3], [content(each) for each in range(3)]) == 3 and store.get(KEYS[2:3], empty(1)) == 1
    store.clear()
    assert store.get(KEYS[2:3], empty(1)) == 0
    assert [path.stat().st_size for path in others] == [3 * FILE] * 3 and (folder / "photos").is_dir()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "restart", "crash", "flip", "cut", "remove", "clear"]),
            st.integers(0, 1),  # which engine
            st.integers(0, 7),
            st.integers(0, FILE - 1),
        ),
        max_size=30,
    )
)
def test_any_order_of_events_gives_the_right_bytes_or_none(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    bound = 4 * FILE
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLES[0], str(folder))
        engines = [Store(Files(max_bytes=bound)) for _ in range(2)]
        intact: set[int] = set()  # what must be there if its file is
        for event, engine, number, position in steps:
            store, path = engines[engine], folder / KEYS[number]
            if event == "put":
                there = path.exists()
                assert store.put([KEYS[number]], [content(number)]) == 1 and path.exists()
                intact |= set() if there else {number}
            elif event == "get":
                buffers = empty(1)
                there = path.exists()
                got = store.get([KEYS[number]], buffers)
                assert not got or np.array_equal(buffers[0], content(number))
                assert got == (there and number in intact)
            elif event == "restart":
                engines[engine] = Store(Files(max_bytes=bound))
            elif event == "crash":  # in the middle of a file
                left = folder / f".{KEYS[number]}.dead{position}"
                left.write_bytes(content(number).tobytes()[:position])
                os.utime(left, (0, 0))
                with store._backend._lock() as lock:  # type: ignore[attr-defined]
                    used = int.from_bytes(os.pread(lock, 8, 0), "little")
                    os.pwrite(lock, (used + FILE).to_bytes(8, "little"), 0)
            elif event == "clear":
                store.clear()
                assert not any((folder / key).exists() for key in KEYS)
            elif path.exists():
                whole = bytearray(path.read_bytes())
                whole[position] ^= 0xFF
                if event == "remove":
                    path.unlink()
                else:
                    path.write_bytes(whole[:position] if event == "cut" else whole)
                    intact.discard(number)
            runs = [key for key in KEYS if (folder / key).exists()]
            assert len(runs) * FILE <= bound


WRITER = """
import sys, numpy as np
from bough.storage.files import Files
from bough.storage.store import Store
from tests.storage.store_checks import KEYS, SIZE, content, empty
store = Store(Files(max_bytes=int(sys.argv[1])))
runs = [content(number) for number in range(8)]
print("ready", flush=True)
for turn in range(int(sys.argv[2])):
    number = (turn * 5 + int(sys.argv[3])) % 8
    store.put([KEYS[number]], [runs[number]])
    buffers = empty(1)
    other = (turn * 3) % 8
    if store.get([KEYS[other]], buffers):
        assert (buffers[0] == runs[other]).all()
assert not store.counts["corrupt"], store.counts
print(store.counts["written"], store.counts["failures"], flush=True)
"""


def start_writer(*arguments: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.slow
def test_two_processes_share_a_folder(folder: Path) -> None:
    writers = [start_writer(4 * FILE, 400, number) for number in range(2)]
    ends = [writer.communicate(timeout=60)[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert all(end.split() == ["ready", "400", "0"] for end in ends)
    assert 0 < bytes_in(folder) <= 4 * FILE


@pytest.mark.slow
def test_a_killed_writer_leaves_no_half_run(folder: Path) -> None:
    for moment in range(3):
        writer = start_writer(4 * FILE, 10**9, moment)
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 30
        while not any((folder / key).exists() for key in KEYS) and time.monotonic() < deadline:
            time.sleep(0.001)
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=30)
    store = Store(Files(max_bytes=4 * FILE))
    found = [number for number in range(8) if (folder / KEYS[number]).exists()]
    assert found
    for number in found:
        buffers = empty(1)
        assert store.get([KEYS[number]], buffers) == 1 and np.array_equal(buffers[0], content(number))
    assert store.put(KEYS[:4], [content(number) for number in range(4)]) == 4

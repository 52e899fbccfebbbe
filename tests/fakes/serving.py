"""A real server for tests: `bough serve` in a process of its own, on a free port, always ended."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO

READY = re.compile(r"is served at (\S+)")
START_LIMIT_S = 300
END_LIMIT_S = 60


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The address of a server that was started with these flags and is ready."""
    command = [sys.executable, "-m", "bough.cli.main", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _await_address(process)
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _await_address(process: subprocess.Popen[str]) -> str:
    """Reads until the ready line. What comes later is read too, so that the server never waits for its log's reader."""
    assert process.stdout is not None
    lines: list[str] = []
    found = threading.Event()
    reader = threading.Thread(target=_read, args=(process.stdout, lines, found), daemon=True)
    reader.start()
    found.wait(START_LIMIT_S)
    address = READY.search("".join(lines))
    if address is None:
        raise AssertionError(f"the server did not start: {''.join(lines)}")
    return address[1]


def _read(output: IO[str], lines: list[str], found: threading.Event) -> None:
    with contextlib.suppress(ValueError):  # closed while it was read
        for line in output:
            if not found.is_set():
                lines.append(line)
            if READY.search(line):
                found.set()
    found.set()

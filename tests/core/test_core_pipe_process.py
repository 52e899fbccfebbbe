"""How long a process is waited for: its computing counts, and not that others have its core."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from bough.core.pipe_process import PipeProcess

MUCH = 10**6


@pytest.fixture
def process() -> Iterator[PipeProcess]:
    made = PipeProcess("tests.fakes.idle_process")
    made.ask(b"hello", 120.0)  # so that its start does not count
    yield made
    made.end()


def test_a_process_without_a_core_is_waited_for(process: PipeProcess) -> None:
    threading.Timer(1.0, os.kill, (process._process.pid, signal.SIGCONT)).start()
    assert process.ask(b"stop", 0.2, MUCH) == b"stop"


def test_a_process_that_computes_for_too_long_is_not(process: PipeProcess) -> None:
    with pytest.raises(TimeoutError):
        process.ask(b"compute", 0.2, MUCH)


@pytest.mark.parametrize("patience", [1, 3])
def test_nor_is_one_that_never_does_anything(process: PipeProcess, patience: int) -> None:
    with pytest.raises(TimeoutError):
        process.ask(b"pause", 0.05, patience)

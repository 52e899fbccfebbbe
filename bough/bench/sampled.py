"""A profile on request, across processes: the measured process samples itself, SIGUSR2 has it write what it counted.

Files in a folder that both know carry the profiles, numbered as they are asked for.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from bough.bench.sampler import Profile, Sampler
from bough.core.errors import EngineDeadError

PATIENCE_S = 60.0


def _file(folder: Path, number: int) -> Path:
    return folder / f"profile-{number}.json"


def offer_profiles(folder: Path) -> None:
    """Starts to sample this process, whose main thread must be the caller."""
    sampler = Sampler()
    numbers = itertools.count()

    def write(number: int, frame: FrameType | None) -> None:
        scratch = folder / "scratch"
        scratch.write_bytes(msgspec.json.encode(sampler.take()))
        scratch.replace(_file(folder, next(numbers)))

    signal.signal(signal.SIGUSR2, write)
    sampler.start()


class Profiles:
    """Asks one process for its profiles."""

    def __init__(self, process_id: int, folder: Path, is_alive: Callable[[], bool]) -> None:
        self._process_id = process_id
        self._folder = folder
        self._is_alive = is_alive
        self._asked = 0

    def take(self) -> Profile:
        """What the process did since this was last asked."""
        os.kill(self._process_id, signal.SIGUSR2)
        file = _file(self._folder, self._asked)
        deadline = time.monotonic() + PATIENCE_S
        while not file.exists():
            if time.monotonic() > deadline or not self._is_alive():
                raise EngineDeadError("The process under measurement does not give its profile.")
            time.sleep(0.01)
        self._asked += 1
        return msgspec.json.decode(file.read_bytes(), type=Profile)

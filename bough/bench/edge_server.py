"""The server that `bough bench edge` measures: `bough serve` with an executor that answers at once.

Run as `python -m bough.bench.edge_server FOLDER`, with its settings as JSON on standard input. Its main process, which
speaks HTTP, is sampled: each SIGUSR2 has it write what was counted since the last one to the next file in FOLDER.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec

from bough.bench.null_executor import BUILDER
from bough.bench.sampler import Sampler
from bough.core.settings import Settings
from bough.launch.service import serve


def profile_file(folder: Path, number: int) -> Path:
    return folder / f"profile-{number}.json"


def main() -> None:
    folder = Path(sys.argv[1])
    settings = Settings.from_flat(json.load(sys.stdin))
    sampler = Sampler()
    numbers = itertools.count()

    def write(number: int, frame: FrameType | None) -> None:
        scratch = folder / "scratch"
        scratch.write_bytes(msgspec.json.encode(sampler.take()))
        scratch.replace(profile_file(folder, next(numbers)))

    signal.signal(signal.SIGUSR2, write)
    sampler.start()
    serve(settings, BUILDER)


if __name__ == "__main__":
    main()

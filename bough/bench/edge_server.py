"""The server that `bough bench edge` measures: `bough serve` with an executor that answers at once.

Run as `python -m bough.bench.edge_server FOLDER`, with its settings as JSON on standard input. Its main process, which
speaks HTTP, is sampled and gives its profiles through FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bough.bench.null_executor import BUILDER
from bough.bench.sampled import offer_profiles
from bough.core.settings import Settings
from bough.launch.service import serve


def main() -> None:
    settings = Settings.from_flat(json.load(sys.stdin))
    offer_profiles(Path(sys.argv[1]))
    serve(settings, BUILDER)


if __name__ == "__main__":
    main()

"""`bough bench`: hands over to one of the benchmarks, each of which reads its own flags."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from bough.cli.commands import HELP_FLAGS, Command, Menu

MENU = Menu(
    program="bough bench",
    about="Measures how fast the engine and its parts are.",
    commands={
        "offline": Command("many requests at once through the offline engine", "bough.bench.offline"),
        "one-batch": Command("one batch straight through the executor", "bough.bench.one_batch"),
        "tree": Command("the radix tree alone: matching, inserting, evicting", "bough.bench.tree"),
    },
    flags={},
)


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first word names with the words after it."""
    if not argv or argv[0] in HELP_FLAGS:
        print(MENU.help())
        return 0
    benchmark = importlib.import_module(MENU.pick(argv).module)
    return int(benchmark.main(list(argv[1:])) or 0)

"""`bough bench`: one of the benchmarks, with its own flags and, where it starts an engine, the engine's.

A benchmark is a module with `add_flags(parser)` and `main(args)`, or `main(args, settings)` if it runs an engine.
"""

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from bough.cli.commands import HELP_FLAGS, Menu, Parser, commands_of
from bough.cli.flags import add_engine_flags, given_settings
from bough.core.errors import SettingsError

MENU = Menu(
    program="bough bench",
    about="Measures how fast the engine and its parts are.",
    commands=commands_of("bench", "bough.bench") | commands_of("parts", "tests.bench", " (in a checkout)"),
    flags={},
)


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in HELP_FLAGS:
        print(MENU.help())
        return 0
    command = MENU.pick(argv)
    try:
        benchmark = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name not in ("tests", "tests.bench", command.module):
            raise
        text = f"`{MENU.program} {argv[0]}` is for developers: run it in a checkout of Bough's source."
        raise SettingsError(text) from None
    return run_benchmark(f"{MENU.program} {argv[0]}", benchmark, argv[1:])


def run_benchmark(program: str, benchmark: Any, argv: Sequence[str]) -> int:
    parser = Parser(program=program, about=benchmark.__doc__ or "")
    benchmark.add_flags(parser)
    if len(inspect.signature(benchmark.main).parameters) == 1:
        return int(benchmark.main(parser.parse(argv)))
    add_engine_flags(parser)
    args = parser.parse(argv)
    return int(benchmark.main(args, given_settings(args)))

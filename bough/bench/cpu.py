"""`bough bench cpu`: how fast Bough is on this CPU and, with `--against llama-cpp`, beside llama.cpp on the same cores.

Both run alternately in one run, each in a process of its own while the other one waits, on the same GGUF file, threads
and prompts. Bough is measured as users have it (`engine`) and without its processes (`executor`). What it prints it
also draws: a page that needs nothing else, and a picture where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bough.bench.cpu_cases import VOCABULARY, Case, cases
from bough.bench.cpu_drawing import html_page, write_png
from bough.bench.cpu_peer import build_peer, find_peer
from bough.bench.cpu_results import CaseResult, Comparison, StartResult, case_result, json_report, text_report
from bough.bench.cpu_sides import RunningSide, Side, bough_side, llama_side, running
from bough.bench.number_checks import require_counts
from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.loader.locate import ModelFiles, locate
from bough.version import __version__

NAMES = [case.name for case in cases()]
ENGINE, EXECUTOR, LLAMA = "engine", "executor", "llama.cpp"


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--against", choices=["llama-cpp"], help="measure this engine as well, and print ratios to it")
    load.add_argument("--llama-python", metavar="PATH", help="a Python with llama_cpp; found or built when left out")
    load.add_argument("--case", nargs="+", choices=NAMES, default=NAMES, help="loads to run")
    load.add_argument("--rounds", type=int, default=5, help="runs of each load on each side, after one to warm up")
    load.add_argument("--starts", type=int, default=3, help="how often each side is started")
    load.add_argument("--scale", type=float, default=1.0, help="shortens all loads, for a quick try")
    load.add_argument("--vocab", type=int, default=VOCABULARY, help="token ids of the prompts are below this")
    load.add_argument("--profile", action="store_true", help="show what each part of a step costs, and nothing else")
    load.add_argument("--no-executor", action="store_true", help="leave out Bough without its processes")
    load.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time that a single thread computes, for machines that others use; leaves out the engine, whose "
        "processes share it",
    )
    load.add_argument("--output", default="bench-cpu", metavar="PATH", help="where .html, .json and .png go")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    _check(args)
    chosen = Settings.from_flat(settings)
    files = locate(chosen.model.model_path, chosen.model.revision)
    model = str(files.gguf or files.folder)
    threads = chosen.model.cpu_threads or _default_threads()
    settings = {name: value for name, value in settings.items() if name not in ("model_path", "cpu_threads")}
    if args.cpu_time and threads > 1:
        raise SettingsError("--cpu-time is for one thread: add --cpu-threads 1.")
    loads = [msgspec.structs.replace(c, cpu_time=args.cpu_time) for c in cases(args.scale, vocabulary=args.vocab)]
    if args.profile:
        from bough.bench.cpu_profile import profile

        print(profile(model, threads, settings, next(case for case in loads if case.name == "streams-16")))
        return 0
    sides = _sides(args, files)
    wanted = [case for case in loads if case.name in args.case]
    found = compare(sides, wanted, args.rounds, args.starts, model, threads, settings)
    found = msgspec.structs.replace(found, about=_about(args, sides, files.name, threads))
    base = LLAMA if args.against else None
    print(text_report(found, base))
    _write(found, base, args.output)
    return 0


def _sides(args: argparse.Namespace, files: ModelFiles) -> list[Side]:
    """What is compared; builds llama.cpp if it must."""
    sides = [] if args.cpu_time else [bough_side(ENGINE, "Bough")]
    if args.cpu_time or not args.no_executor:
        sides.append(bough_side(EXECUTOR, "Bough, executor alone"))
    if args.against:
        if files.gguf is None:
            raise SettingsError("--against llama-cpp needs a model that llama.cpp reads: a GGUF file.")
        sides.append(llama_side(find_peer(args.llama_python) or build_peer()))
    return sides


def compare(
    sides: Sequence[Side],
    loads: Sequence[Case],
    rounds: int,
    starts: int,
    model: str,
    threads: int,
    settings: dict[str, Any],
) -> Comparison:
    """Starts every side, one after the other and several times, then lets them take turns under each load."""
    began: dict[str, list[Any]] = {side.name: [] for side in sides}
    for _ in range(starts - 1):
        for side in sides:
            with running(side, model, threads, settings) as process:
                began[side.name].append(process.start)
    with contextlib.ExitStack() as stack:
        live = [stack.enter_context(running(side, model, threads, settings)) for side in sides]
        for process in live:
            began[process.side.name].append(process.start)
        measured = [_measure(case, live, rounds) for case in loads]
        ends = [StartResult(p.side.name, began[p.side.name], p.peak_bytes()) for p in live]
    return Comparison({}, measured, ends)


def _measure(case: Case, live: Sequence[RunningSide], rounds: int) -> CaseResult:
    """Rounds of one load. Who goes first changes from round to round."""
    print(f"{case.title} …", file=sys.stderr)
    rates: dict[str, list[float]] = {process.side.name: [] for process in live}
    for process in live:
        process.run(case)
    for number in range(rounds):
        for process in [*live[number % len(live) :], *live[: number % len(live)]]:
            rates[process.side.name].append(process.run(case).rate(case))
    return case_result(case, rates)


def _check(args: argparse.Namespace) -> None:
    require_counts(args, ("rounds", "starts"))
    if not 0 < args.scale <= 1:
        raise SettingsError(f"--scale must be above 0 and at most 1, got {args.scale}.")


def _default_threads() -> int:
    from bough.executor.machine import compute_cores

    return compute_cores()


def _about(args: argparse.Namespace, sides: Sequence[Side], model: str, threads: int) -> dict[str, Any]:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "command": shlex.join(["bough", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores, {platform.machine()}; load average at the end {load}",
        "model": model,
        "threads": threads,
        "versions": ", ".join([f"bough {__version__}", *(side.title for side in sides if side.name == LLAMA)]),
        "rounds": args.rounds,
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unnamed CPU"


def _write(found: Comparison, base: str | None, output: str) -> None:
    pages = {".json": json_report(found, base), ".html": html_page(found, base).encode()}
    try:
        for suffix, content in pages.items():
            Path(output + suffix).write_bytes(content)
        drawn = write_png(found, base, output + ".png")
    except OSError as error:
        raise SettingsError(f"Cannot write {output}.*: {error.strerror or error}; set --output.") from None
    written = [*pages, ".png"] if drawn else [*pages]
    print("written: " + ", ".join(output + suffix for suffix in written))

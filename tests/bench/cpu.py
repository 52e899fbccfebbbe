"""`bough bench cpu`: how fast Bough is on this CPU and, with `--against llama-cpp`, beside llama.cpp on the same cores.

Each side is a process of its own (with its children), with the same GGUF file, threads and prompts. They take turns:
one works while the others wait for a line on their standard input and use no core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from bough.core.child_environment import child_environment
from bough.core.errors import EngineDeadError, SettingsError
from bough.core.setting_checks import require_counts
from bough.core.settings import Settings
from bough.loader.locate import locate
from bough.version import __version__
from tests.bench import cpu_llama_side
from tests.bench.cpu_cases import VOCABULARY, Case, Order, Start, Timing, cases
from tests.bench.cpu_llama import Peer, build_peer, find_peer
from tests.bench.cpu_report import CaseResult, Comparison, SideResult, StartResult, json_report, text_report

NAMES = [case.name for case in cases()]
LLAMA = "llama.cpp"
EXIT_TIMEOUT_S = 30.0

Reply = TypeVar("Reply", Start, Timing)


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--against", choices=["llama-cpp"], help="measure this engine as well, and print ratios to it")
    load.add_argument("--llama-python", metavar="PATH", help="a Python with llama_cpp; found or built when left out")
    load.add_argument("--case", nargs="+", choices=NAMES, default=NAMES, help="loads to run")
    load.add_argument("--rounds", type=int, default=5, help="runs of each load on each side, after one to warm up")
    load.add_argument("--starts", type=int, default=3, help="how often each side is started")
    load.add_argument("--scale", type=float, default=1.0, help="shortens all loads, for a quick try")
    load.add_argument("--vocab", type=int, default=VOCABULARY, help="token ids of the prompts are below this")
    load.add_argument("--output", default="bench-cpu", metavar="PATH", help="PATH.json gets all rates and ratios")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    return measure(args, settings, [ENGINE])


# ---- what is compared


@dataclass(frozen=True, slots=True)
class Side:
    """One of the engines compared, and how its process is started."""

    name: str
    title: str
    command: tuple[str, ...]


ENGINE = Side("engine", "Bough", (sys.executable, "-P", "-m", "tests.bench.cpu_engine_side"))


def llama_side(peer: Peer) -> Side:
    script = str(Path(cpu_llama_side.__file__))
    return Side(LLAMA, f"llama.cpp (llama-cpp-python {peer.version})", (str(peer.python), "-P", script))


class RunningSide:
    """A side's process."""

    def __init__(self, side: Side, model: str, threads: int, settings: dict[str, Any]) -> None:
        self.side = side
        spawned = time.monotonic()
        self._process = subprocess.Popen(
            side.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
        )
        start = self._ask(Order(model, threads, spawned, settings), Start)
        spent = [process.cpu_times() for process in self._tree()]
        self.start = msgspec.structs.replace(start, cpu_s=sum(times.user + times.system for times in spent))

    def run(self, case: Case) -> Timing:
        return self._ask(case, Timing)

    def peak_bytes(self) -> int:
        """The most memory that each of its processes has held, together."""
        return sum(_peak_of(process) for process in self._tree())

    def _tree(self) -> list[psutil.Process]:
        """The process and all that it has started."""
        top = psutil.Process(self._process.pid)
        return [top, *top.children(recursive=True)]

    def end(self) -> None:
        """Closes its input, which ends it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, order: Order | Case, reply: type[Reply]) -> Reply:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which its answer shows
            self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EngineDeadError(f"The measured process of {self.side.title} has died; its error stands above.")
        return msgspec.json.decode(line, type=reply)


def _peak_of(process: psutil.Process) -> int:
    """Linux keeps the peak; elsewhere the current use stands in for it."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    return int(process.memory_info().rss)


@contextlib.contextmanager
def running(side: Side, model: str, threads: int, settings: dict[str, Any]) -> Iterator[RunningSide]:
    process = RunningSide(side, model, threads, settings)
    try:
        yield process
    finally:
        process.end()


# ---- measuring


def measure(args: argparse.Namespace, settings: dict[str, Any], sides: list[Side], *, cpu_time: bool = False) -> int:
    """Compares `sides`, and llama.cpp where the flags ask for it; prints and writes what it found."""
    require_counts(args, ("rounds", "starts"))
    if not 0 < args.scale <= 1:
        raise SettingsError(f"--scale must be above 0 and at most 1, got {args.scale}.")
    chosen = Settings.from_flat(settings)
    files = locate(chosen.model.model_path, chosen.model.revision)
    threads = chosen.model.cpu_threads or _default_threads()
    if cpu_time and threads > 1:
        raise SettingsError("--cpu-time is for one thread: add --cpu-threads 1.")
    if args.against:
        if files.gguf is None:
            raise SettingsError("--against llama-cpp needs a model that llama.cpp reads: a GGUF file.")
        sides = [*sides, llama_side(find_peer(args.llama_python) or build_peer())]
    loads = [
        msgspec.structs.replace(case, cpu_time=cpu_time)
        for case in cases(args.scale, vocabulary=args.vocab)
        if case.name in args.case
    ]
    rest = {name: value for name, value in settings.items() if name not in ("model_path", "cpu_threads")}
    found = compare(sides, loads, args.rounds, args.starts, str(files.gguf or files.folder), threads, rest)
    found = msgspec.structs.replace(found, about=_about(args, sides, files.name, threads))
    base = LLAMA if args.against else None
    print(text_report(found, base))
    output = args.output.removesuffix(".json") + ".json"
    try:
        Path(output).write_bytes(json_report(found, base))
    except OSError as error:
        raise SettingsError(f"Cannot write {output}: {error.strerror or error}; set --output.") from None
    print(f"written: {output}")
    return 0


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
    began: dict[str, list[Start]] = {side.name: [] for side in sides}
    for _ in range(starts - 1):
        for side in sides:
            with running(side, model, threads, settings) as process:
                began[side.name].append(process.start)
    with contextlib.ExitStack() as stack:
        live = [stack.enter_context(running(side, model, threads, settings)) for side in sides]
        for process in live:
            began[process.side.name].append(process.start)
        measured = [_take_turns(case, live, rounds) for case in loads]
        ends = [StartResult(p.side.name, began[p.side.name], p.peak_bytes()) for p in live]
    return Comparison({}, measured, ends)


def _take_turns(case: Case, live: Sequence[RunningSide], rounds: int) -> CaseResult:
    """Rounds of one load. Who goes first changes from round to round."""
    print(f"{case.title} …", file=sys.stderr)
    rates: dict[str, list[float]] = {process.side.name: [] for process in live}
    for process in live:
        process.run(case)
    for number in range(rounds):
        for process in [*live[number % len(live) :], *live[: number % len(live)]]:
            rates[process.side.name].append(process.run(case).rate(case))
    return CaseResult(case.name, case.title, [SideResult(side, of_side) for side, of_side in rates.items()])


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

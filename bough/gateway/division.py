"""How the engines of one machine share it: memory, compute threads, devices. Counts in, flags out; it keeps nothing.

An engine's `--mem-fraction-static` is, on a GPU, the share of the device that may be in use once the engine has taken
its part, so it grows with those that are there before; on a CPU it is the share of the free memory that it takes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

USABLE = 0.9  # of the memory; the rest is for what libraries and other programs take


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them


@dataclass(frozen=True, slots=True)
class Share:
    """What one engine is started with."""

    flags: tuple[str, ...]
    environment: dict[str, str]


def this_machine(engine_flags: Sequence[str]) -> Machine:
    """Cores that this process may use, and the GPUs, unless the engines run on the CPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = tuple(path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*")))
    gpus = found if visible is None else tuple(filter(None, visible.split(",")))
    words = [word for flag in engine_flags for word in flag.split("=")]
    on_cpu = any(pair == ("--device", "cpu") for pair in itertools.pairwise(words))
    return Machine(cores, () if on_cpu or not found else gpus)


def gpu_of(number: int, machine: Machine) -> str | None:
    """The device of the engine with that number; they are dealt out in turn."""
    return machine.gpus[number % len(machine.gpus)] if machine.gpus else None


def share_of(number: int, engines: int, running: Sequence[int], machine: Machine, given: Sequence[str]) -> Share:
    """The share of an engine while those with the numbers in `running` hold theirs. What the user gives stands."""
    flags: list[str] = []
    environment: dict[str, str] = {}
    gpu = gpu_of(number, machine)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    if not _gives(given, "mem-fraction-static") and not _gives(given, "max-total-tokens") and engines > 1:
        mates = [other for other in range(engines) if gpu_of(other, machine) == gpu]
        present = sum(other in mates for other in running if other != number) if gpu is not None else 0
        flags += ["--mem-fraction-static", f"{USABLE * (present + 1) / len(mates):.3f}"]
    if not _gives(given, "cpu-threads"):
        flags += ["--cpu-threads", str(max(1, machine.cores // engines))]
    return Share(tuple(flags), environment)


def _gives(flags: Sequence[str], name: str) -> bool:
    spellings = (f"--{name}", f"--{name.replace('-', '_')}")
    return any(flag.partition("=")[0] in spellings for flag in flags)

"""How the engines of one machine share it: memory, compute threads, devices. Pure: counts in, flags out.

An engine's `--mem-fraction-static` is, on a GPU, the share of the device that may be in use once the engine has taken
its part, so it grows with those that are there before; on a CPU it is the share of the free memory that it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

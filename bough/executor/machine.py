"""What this machine offers to a process: memory and cores, container limits counted. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


def free_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that can still be used: the machine's, or what the container's limit leaves, if that is less."""
    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read_int(cgroup / limit_file), _read_int(cgroup / used_file)
        if limit is not None and used is not None:
            free = min(free, max(limit - used, 0))
    return free


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: its affinity mask, or the container's quota, if that is less."""
    cores = len(_allowed_cpus())
    quota = _cpu_quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(quota)))


def compute_cores(cgroup: Path = CGROUP, topology: Path = TOPOLOGY) -> int:
    """Cores that can multiply at the same time: of two hardware threads on one core, only one counts."""
    return min(usable_cores(cgroup), physical_cores(_allowed_cpus(), topology))


def physical_cores(cpus: Iterable[int], topology: Path = TOPOLOGY) -> int:
    """Different cores among these CPUs, as the system numbers them; where it does not tell, each is one."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def _allowed_cpus() -> set[int]:
    """By number; where the system does not say which, as many as there are."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the container may use; None: no limit."""
    try:
        amount, period = (cgroup / "cpu.max").read_text().split()
        return None if amount == "max" else max(1.0, int(amount) / int(period))
    except (OSError, ValueError):
        pass
    amount_us, period_us = _read_int(cgroup / "cpu/cpu.cfs_quota_us"), _read_int(cgroup / "cpu/cpu.cfs_period_us")
    if not amount_us or not period_us or amount_us < 0:
        return None
    return max(1.0, amount_us / period_us)


def _read_int(path: Path) -> int | None:
    """The number in a file; None where there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

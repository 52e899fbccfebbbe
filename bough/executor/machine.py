"""What this machine offers to a process: memory and cores, container limits counted. Torch-free."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from bough.native.tape import MAX_THREADS

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")
FEW_CORES = 4  # up to here a core less is felt


def free_memory_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Memory that can still be used: the machine's, or what the container's limit leaves, if that is less."""
    left = map(_memory_left, _groups(cgroup, "memory", membership))
    return min([int(psutil.virtual_memory().available), *(free for free in left if free is not None)])


def usable_cores(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Cores that this process may use: its affinity mask, or the container's quota, if that is less."""
    quotas = map(_cpu_quota, _groups(cgroup, "cpu", membership))
    return max(1, int(min([len(_allowed_cpus()), *(quota for quota in quotas if quota is not None)])))


def compute_cores(cgroup: Path = CGROUP, topology: Path = TOPOLOGY) -> int:
    """Cores that can multiply at the same time: of two hardware threads on one core, only one counts. No more than can
    work together on a step; of many, one is left to the engine's other processes."""
    cores = min(usable_cores(cgroup), physical_cores(_allowed_cpus(), topology))
    return min(cores - (cores > FEW_CORES), MAX_THREADS)


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


def _groups(cgroup: Path, controller: str, membership: Path) -> Iterator[Path]:
    """The folders of the control groups that hold this process, of both versions: a limit of any of them counts. A
    container sees its own group as the root; without one (a service's, a user's slice) it lies somewhere below."""
    roots = (cgroup, cgroup / controller)
    yield from roots
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        inside = Path(path.lstrip("/"))
        if (number == "0" or controller in controllers.split(",")) and ".." not in inside.parts:
            root = roots[0 if number == "0" else 1]
            yield from (root / group for group in (inside, *inside.parents) if group != Path())


def _memory_left(group: Path) -> int | None:
    """What a group's limit leaves; None: it has none. What it only remembers of files is given up when asked for."""
    for limit_file, used_file, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read_int(group / limit_file), _read_int(group / used_file)
        if limit is not None and used is not None:
            return max(limit - max(used - _read_entry(group / "memory.stat", files), 0), 0)
    return None


def _cpu_quota(group: Path) -> float | None:
    """Cores' worth of time that a group may use; None: no limit."""
    try:
        amount, period = (group / "cpu.max").read_text().split()
        return None if amount == "max" else int(amount) / int(period)
    except (OSError, ValueError):
        pass
    amount_us, period_us = _read_int(group / "cpu.cfs_quota_us"), _read_int(group / "cpu.cfs_period_us")
    if not amount_us or not period_us or amount_us < 0:
        return None
    return amount_us / period_us


def _read_entry(path: Path, name: str) -> int:
    """The number behind a name in a file of such lines; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _read_int(path: Path) -> int | None:
    """The number in a file; None where there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

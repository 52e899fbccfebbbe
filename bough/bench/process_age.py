"""How long this process has run since it was started: what a user waits for begins before any code of ours."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

START_FIELD = 22 - 3  # of /proc/self/stat, counted behind the name, which may hold anything: clock ticks since the boot


def process_age_s() -> float:
    """Seconds since this process was started, to a hundredth on Linux."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.time() - psutil.Process().create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s(stat.read_text(), os.sysconf("SC_CLK_TCK"))


def started_s(stat: str, ticks_per_s: int) -> float:
    """When the process of this /proc/.../stat was started, in seconds since the boot. psutil adds the time of the boot,
    which the kernel tells in whole seconds."""
    return int(stat.rpartition(")")[2].split()[START_FIELD]) / ticks_per_s

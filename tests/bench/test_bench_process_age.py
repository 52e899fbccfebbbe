"""The start of a process, as the kernel tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the clock is not monotonic")
@pytest.mark.parametrize("name", ["python", "a) name (b", ")"])
def test_the_age_holds_what_came_before_the_first_line(name: str) -> None:
    """A process cannot tell less than the time since its own first look at a clock that runs on from the boot, nor much
    more. The kernel shows its start behind its name, which may hold anything."""
    code = (
        "import time; first = time.clock_gettime(time.CLOCK_BOOTTIME); time.sleep(0.05)\n"
        f"from pathlib import Path; Path('/proc/self/comm').write_text({name!r})\n"
        "from bough.bench.offline import process_age_s\n"
        "age = process_age_s(); print(age - (time.clock_gettime(time.CLOCK_BOOTTIME) - first))"
    )
    before = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert -0.02 < before < 60.0  # the kernel counts hundredths

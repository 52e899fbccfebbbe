"""The start of a process, as the kernel tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bough.bench.offline import started_s


@pytest.mark.parametrize("name", ["python", "a) name (b", ")"])
def test_the_start_is_read_behind_any_name(name: str) -> None:
    fields = ["S", *(str(number) for number in range(4, 22)), "123456", "7"]  # the third to the 23rd
    assert started_s(f"42 ({name}) {' '.join(fields)}", 100) == 1234.56


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the clock is not monotonic")
def test_the_age_holds_what_came_before_the_first_line() -> None:
    """A process cannot tell less than the time since its own first look at a clock that runs on from the boot."""
    code = (
        "import time; first = time.clock_gettime(time.CLOCK_BOOTTIME); time.sleep(0.05)\n"
        "from bough.bench.offline import process_age_s\n"
        "age = process_age_s(); print(age - (time.clock_gettime(time.CLOCK_BOOTTIME) - first))"
    )
    before = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert before > -0.02  # the kernel counts hundredths

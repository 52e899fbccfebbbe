"""The operations of a row as ARM's vectors compute them, under an emulator; every test of a tape has this CPU's."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from bough.native.build import ARM_FLAGS, COMMON, SOURCES


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64")) or platform.machine() == "aarch64",
    reason="needs a compiler for ARM and an emulator",
)
@pytest.mark.slow
def test_the_arm_operations_under_an_emulator(tmp_path: Path) -> None:
    program, driver = str(tmp_path / "driver"), Path(__file__).with_name("ops_driver.c")
    sources = [str(driver), *map(str, sorted(SOURCES.glob("ops*.c"))), str(SOURCES / "cpu.c")]
    compile_ = ["aarch64-linux-gnu-gcc", *COMMON, *ARM_FLAGS["neon"], "-static", f"-I{SOURCES}", *sources]
    subprocess.run([*compile_, "-lm", "-o", program], check=True)
    done = subprocess.run(["qemu-aarch64", "-cpu", "max", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")

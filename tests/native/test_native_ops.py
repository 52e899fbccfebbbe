"""The operations of a row: what is no number, and ARM's vectors under an emulator; tests of tapes have the rest."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bough.kernels.quant_linear.packed import aligned_bytes
from bough.native.build import ARM_FLAGS, COMMON, SOURCES
from bough.native.tape import Crew, Step, Tape


@pytest.mark.parametrize("activation", [0, 1], ids=["silu", "gelu"])
@pytest.mark.parametrize("place", [0, 9, 50])
def test_nan_passes_through_activations_and_caps(any_tier: ctypes.CDLL, activation: int, place: int) -> None:
    size = 51
    x, out = np.ones((2, size), dtype=np.float32), np.zeros(size, dtype=np.float32)
    x[0, place] = np.nan
    tape, crew = Tape(any_tier), Crew(any_tier, 1)
    tape.add("gate", False, x.ctypes.data, activation, size, out.ctypes.data)
    tape.add("softcap", False, x.ctypes.data, size, 30.0)
    crew.run(tape, Step(tokens=1), aligned_bytes(tape.scratch_bytes(1, 1)).ctypes.data)
    for found in (out, x[0]):
        assert np.flatnonzero(np.isnan(found)).tolist() == [place]


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

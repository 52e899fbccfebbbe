"""The compiled library, and its variants one after the other."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.native.build import COMMON, VARIANT_FLAGS, compiler
from bough.native.library import (
    INSTRUCTION_SETS,
    build_library,
    find_library,
    instruction_sets,
    load_library,
    use_instruction_set,
)
from tests.native.drivers import RunDriver, build_driver


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """Compiled if it is not there."""
    if find_library() is None:
        if compiler() is None:
            pytest.skip("there is no C compiler")
        build_library()
    found = load_library()
    assert found is not None
    return found


ON_ARM = platform.machine() in ("aarch64", "arm64")


@pytest.fixture(params=[name for name in INSTRUCTION_SETS if name == "plain" or (name == "neon") == ON_ARM])
def any_tier(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The library, limited to each instruction set that this CPU has."""
    if request.param not in instruction_sets(library):
        pytest.skip(f"this CPU has no {request.param}")
    use_instruction_set(request.param)
    yield library
    library.bough_cpu_allow(ctypes.c_uint(0xFFFFFFFF))


@pytest.fixture(params=["aarch64", "x86_64"])
def run_emulated(request: pytest.FixtureRequest, tmp_path: Path) -> RunDriver:
    """Compiles a driver with some of the sources for another machine and runs it under an emulator; what it printed."""
    machine: str = request.param
    cc, emulator = f"{machine.replace('_', '-')}-linux-gnu-gcc", f"qemu-{machine}"
    cc = cc if shutil.which(cc) else f"{machine}-linux-gnu-gcc"
    if machine == platform.machine() or not (shutil.which(cc) and shutil.which(emulator)):
        pytest.skip(f"needs a compiler for {machine}, which this machine is not, and an emulator")

    def run(driver: str, sources: list[str]) -> str:
        program = build_driver(tmp_path, [cc, *COMMON], VARIANT_FLAGS[machine], driver, sources)
        done = subprocess.run(
            [emulator, "-L", f"/usr/{machine}-linux-gnu", "-cpu", "max", program],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run

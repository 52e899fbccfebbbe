"""The threads of a step: every tile is drawn once, whoever is late, and a barrier waits for all tiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import bough.native

SOURCES = Path(bough.native.__file__).parent / "src"
DRIVER = Path(__file__).with_name("thread_pool_driver.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def compiled(folder: Path, *flags: str) -> Path:
    program = folder / "thread_pool"
    sources = [str(DRIVER), str(SOURCES / "thread_pool.c")]
    command = [str(COMPILER), "-std=c11", "-O2", *flags, f"-I{SOURCES}", *sources, "-o", str(program), "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0 and flags:
        pytest.skip(f"this compiler has no {' '.join(flags)}: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_tile_is_drawn_once(tmp_path: Path, threads: int) -> None:
    said = subprocess.run([compiled(tmp_path), str(threads)], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stdout + said.stderr


def test_without_a_race(tmp_path: Path) -> None:
    program = compiled(tmp_path, "-g", "-fsanitize=thread")
    said = subprocess.run([program, "3"], capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in said.stderr:
        pytest.skip("the thread sanitizer cannot run under this kernel")
    assert said.returncode == 0, said.stdout + said.stderr[:4000]

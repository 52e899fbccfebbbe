"""The packages: the same sources give the same bytes, an sdist builds the wheel, and the wheel holds what runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bough.native.build import compiler, library_name
from bough.version import __version__

ROOT = Path(__file__).parents[2]
needs_hatchling = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not there")


def build(folder: Path, target: str, out: Path) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.mark.slow
@needs_hatchling
@pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
def test_an_sdist_builds_one_wheel_wherever_it_lies(tmp_path: Path) -> None:
    first, second = (build(ROOT, "sdist", tmp_path / name / "sdist") for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    wheels = []
    for name in ("a", "b/in/another/place"):
        with tarfile.open(first) as packed:
            packed.extractall(tmp_path / name, filter="data")
        wheels.append(build(tmp_path / name / f"bough-{__version__}", "wheel", tmp_path / name / "dist"))
    assert wheels[0].name == wheels[1].name and wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "installed")
    assert f"bough/native/{library_name()}" in names and "bough/server/docs.html" in names
    assert {f"bough/server/ui/{name}" for name in ("index.html", "app.js", "app.css")} <= names
    assert {name.partition("/")[0] for name in names} == {"bough", f"bough-{__version__}.dist-info"}
    assert f"bough-{__version__}.dist-info/licenses/LICENSE" in names
    load = "from bough.native.library import find_library, load_library; print(find_library(), bool(load_library()))"
    said = subprocess.check_output(
        [sys.executable, "-P", "-c", load], text=True, env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    )
    assert said == f"{tmp_path}/installed/bough/native/{library_name()} True\n"

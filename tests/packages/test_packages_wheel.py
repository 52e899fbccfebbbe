"""The packages: the same sources give the same bytes, an sdist builds the wheel, and the wheel holds what runs."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import sys_tags

from bough.native.build import compiler, library_name
from bough.native.library import find_library
from bough.version import __version__

ROOT = Path(__file__).parents[2]
TORCH_NEEDS = 28  # torch's wheels are manylinux_2_28
needs_hatchling = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not there")


def build(folder: Path, target: str, out: Path, **variables: str) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **variables}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


def tag_of_symbols(wheel: Path, scratch: Path) -> str:
    """What binutils says that the library of a wheel needs of glibc."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".so"))
        library = packed.extract(name, scratch / "looked at")
    listed = subprocess.check_output(["readelf", "--wide", "--version-info", "--dynamic", library], text=True)
    assert set(re.findall(r"NEEDED.*\[(.+)\]", listed)) <= {"libc.so.6", "libm.so.6", "libpthread.so.0"}
    newest = max((int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", listed)), default=0)
    assert newest <= TORCH_NEEDS
    machine = wheel.stem.partition("manylinux_")[2].split("_", 2)[2]
    assert f"-{machine}-" in name
    return f"manylinux_2_{max(17, newest)}_{machine}"


def hook() -> Any:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LEADS_NOWHERE = re.compile(r"\]\((?!\w+://)")  # on the page of a package, which has no other files


def test_the_readmes_of_the_packages_have_no_links_to_files() -> None:
    project: dict[str, Any] = {}
    hook().ReadmeHook(str(ROOT), {}).update(project)
    text = project["readme"]["text"]
    assert "(docs/performance.md)" in text and " (docs/models.md" in text and "(docs/docs" not in text
    assert len(text) > 10_000 and not LEADS_NOWHERE.search(text)
    assert not LEADS_NOWHERE.search((ROOT / "clients" / "typescript" / "README.md").read_text())


@pytest.mark.parametrize(
    ("strings", "tag"),
    [
        ("libm.so.6 libc.so.6 GLIBC_2.17 GLIBC_2.34 GLIBC_2.9", "manylinux_2_34_x86_64"),
        ("libc.so.6 ld-linux-x86-64.so.2 GLIBC_2.2.5", "manylinux_2_17_x86_64"),
        ("libc.so.6 libgomp.so.1 GLIBC_2.34", "linux_x86_64"),  # not on every system
        ("libc.musl-x86_64.so.1", "linux_x86_64"),
        ("", "linux_x86_64"),
    ],
)
def test_the_tag_is_the_oldest_manylinux_with_all_that_the_library_needs(strings: str, tag: str) -> None:
    library = b"\x7fELF\0" + b"".join(word.encode() + b"\0" for word in strings.split())
    made = hook().platform_tag(library, "x86_64")
    assert made == tag or (made, tag) == (f"linux_{platform.machine()}", "linux_x86_64")


def test_the_library_loads_wherever_torch_does() -> None:
    library = find_library()
    if library is None:
        pytest.skip("the kernels are not compiled")
    tag = hook().platform_tag(library.read_bytes(), platform.machine())
    assert tag.startswith("manylinux_2_") and int(tag.split("_")[2]) <= TORCH_NEEDS


@pytest.mark.slow
@needs_hatchling
def test_a_wheel_is_made_for_another_machine(tmp_path: Path) -> None:
    machine = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    cc = f"{machine}-linux-gnu-gcc"
    if shutil.which(cc) is None or shutil.which("readelf") is None:
        pytest.skip(f"there is no {cc}, or no binutils")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "bough", tree / "bough", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tree / "clients" / "ui").mkdir(parents=True)
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE", "clients/ui/LICENSES"):
        shutil.copy(ROOT / name, tree / name)
    wheel = build(tree, "wheel", tmp_path / "dist", CC=cc, WHEEL_MACHINE=machine)
    assert wheel.name == f"bough-{__version__}-py3-none-{tag_of_symbols(wheel, tmp_path)}.whl"


@pytest.mark.slow
@needs_hatchling
@pytest.mark.skipif(shutil.which("readelf") is None, reason="there are no binutils")
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
    assert wheels[0].stem.endswith(f"py3-none-{tag_of_symbols(wheels[0], tmp_path)}")
    assert wheels[0].stem.rpartition("-")[2] in {tag.platform for tag in sys_tags()}, "pip would refuse it here"
    with zipfile.ZipFile(wheels[0]) as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "installed")
    assert f"bough/native/{library_name()}" in names and "bough/server/docs.html" in names
    assert {f"bough/server/ui/{name}" for name in ("index.html", "app.js", "app.css")} <= names
    assert {name.partition("/")[0] for name in names} == {"bough", f"bough-{__version__}.dist-info"}
    licences = {f"bough-{__version__}.dist-info/licenses/{name}" for name in ("LICENSE", "clients/ui/LICENSES")}
    assert licences <= names, "that of Bough, and those of what the page holds"
    load = "from bough.native.library import find_library, load_library; print(find_library(), bool(load_library()))"
    said = subprocess.check_output(
        [sys.executable, "-P", "-c", load], text=True, env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    )
    assert said == f"{tmp_path}/installed/bough/native/{library_name()} True\n"

"""The Containerfile: read; its wheel built from what it copies; where there is a builder, built, started and asked."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bough.core.settings import Settings

ROOT = Path(__file__).parents[2]
UNCOMMENTED = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.MULTILINE)
TEXT = UNCOMMENTED.replace("\\\n", " ")
STEPS = [tuple(line.split(" ", 1)) for line in TEXT.splitlines() if line.strip()]
KNOWN = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}


def steps(word: str) -> list[str]:
    return [rest for name, rest in STEPS if name == word]


def test_every_line_is_a_step() -> None:
    assert {name for name, _ in STEPS} == KNOWN
    assert STEPS[0][0] == "ARG" and len(steps("FROM")) == 2


def test_what_is_copied_is_there_and_is_what_the_wheel_needs() -> None:
    copied = {word for rest in steps("COPY") if "--from" not in rest for word in rest.split()[:-1]}
    assert not [name for name in copied if not (ROOT / name).exists()]
    ignored = (ROOT / ".containerignore").read_text().split()
    assert (ROOT / ".dockerignore").read_text().split() == ignored, "docker reads no other"
    assert {"**/*.so", "**/__pycache__", ".git"} <= set(ignored), "what was built here, for this machine"
    assert not copied & set(ignored)
    files = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "clients/ui/LICENSES"}
    assert copied >= {*files, "bough", "constraints.txt"}
    assert "--from=wheel" in TEXT and "AS wheel" in TEXT


def test_it_installs_as_the_makefile_does_with_extras_that_there_are() -> None:
    made = (ROOT / "Makefile").read_text()
    assert "--constraint constraints.txt torch" in made  # torch first and pinned, there as here
    pinned = [rest for rest in steps("RUN") if "pip install" in rest]
    assert len(pinned) == 3 and all("--constraint" in rest for rest in pinned) and " torch" in pinned[1]
    assert "-m hatchling build" in made and "-m hatchling build" in pinned[0]
    extras = re.search(r"bough-\*\.whl\)\[([\w,]+)\]", pinned[2])
    declared = re.findall(r"^([a-z-]+) = \[$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extras is not None and set(extras[1].split(",")) <= set(declared)


def test_it_runs_as_a_user_without_rights_and_serves_the_port_that_it_names() -> None:
    server = Settings().server
    (user,), (port,) = steps("USER"), steps("EXPOSE")
    assert user != "0" and f"useradd --uid {user} " in TEXT and int(port) == server.port
    (volume,), (variables,) = steps("VOLUME"), (dict(re.findall(r"(\w+)=(\S+)", rest)) for rest in steps("ENV"))
    assert (variables["BOUGH_HOME"], variables["TRITON_CACHE_DIR"]) == (volume, f"{volume}/triton")
    assert json.loads(steps("ENTRYPOINT")[0]) == ["bough"]
    assert json.loads(steps("CMD")[0]) == ["serve", "--host", "0.0.0.0"]


@pytest.mark.parametrize("run", steps("RUN"))
def test_the_shell_can_read_every_command(run: str) -> None:
    shell = shutil.which("dash") or shutil.which("sh")
    assert shell is not None
    subprocess.run([shell, "-n", "-c", run], check=True)


@pytest.mark.parametrize(
    ("works", "said"),
    [
        (["docker", "buildah"], "docker build "),
        (["buildah"], "buildah build "),
        ([], "No podman, docker or buildah works here"),
    ],
)
def test_the_builder_is_the_first_that_works(works: list[str], said: str, tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make")
    for name in ("podman", "docker", "buildah"):
        command = tmp_path / name
        end = 0 if name in works else 1  # as of a docker whose daemon does not run
        command.write_text(f'#!/bin/sh\nif [ "$1" = info ]; then exit {end}; fi\necho {name} "$@"\n')
        command.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in ("BUILDER", "VARIANT", "MAKEFLAGS")}
    environ |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([make, "-s", "image"], cwd=ROOT, capture_output=True, text=True, env=environ)
    assert said in done.stdout and (done.returncode == 0) == bool(works)


def test_the_pages_say_how_it_is_built_and_with_what_it_was() -> None:
    page = " ".join((ROOT / "docs" / "install.md").read_text().split())
    assert "make image VARIANT=cuda" in page and "python -m tools.image" in page and "BASE=" in page


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not there")
def test_the_wheel_is_built_from_what_is_copied_and_nothing_else(tmp_path: Path) -> None:
    """The first stage in an empty folder. The compiler refuses, because the kernels are built elsewhere."""
    first = [rest for name, rest in STEPS[: [name for name, _ in STEPS].index("FROM", 2)] if name == "COPY"]
    for *sources, place in map(str.split, first):
        for source in sources:
            target = tmp_path / "src" / place / ("" if source == place else Path(source).name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                shutil.copy(ROOT / source, target)
    (built,) = (re.search(r"-m (hatchling build .*)$", run) for run in steps("RUN") if "hatchling build" in run)
    assert built is not None
    words = [sys.executable, "-m", *built[1].replace("/dist", str(tmp_path / "dist")).split()]
    subprocess.run(words, cwd=tmp_path / "src", check=True, env={**os.environ, "CC": "false"}, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as packed:
        assert {"bough/cli/main.py", "bough/server/ui/app.js"} <= set(packed.namelist())


SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}  # of Debian, by the Python that wheels here may be for


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("buildah") is None or shutil.which("mmdebstrap") is None,
    reason="needs root, buildah and mmdebstrap",
)
def test_the_image_is_built_and_its_server_answers() -> None:
    suite = SUITES.get(sys.version_info[:2], "trixie")
    words = [sys.executable, "-m", "tools.image", "--suite", suite]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["answer"] and report["users"] == steps("USER") and report["exit_code"] == 0

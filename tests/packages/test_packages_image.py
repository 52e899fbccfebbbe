"""The Containerfile, read: there is no builder to build it with where tests run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
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
    assert not copied & set(ignored)
    assert copied >= {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "bough", "constraints.txt"}
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
    assert json.loads(steps("ENTRYPOINT")[0]) == ["bough"]
    assert json.loads(steps("CMD")[0]) == ["serve", "--host", "0.0.0.0"]


@pytest.mark.parametrize("run", steps("RUN"))
def test_the_shell_can_read_every_command(run: str) -> None:
    shell = shutil.which("dash") or shutil.which("sh")
    assert shell is not None
    subprocess.run([shell, "-n", "-c", run], check=True)


def test_the_pages_say_that_it_was_read_and_not_built() -> None:
    page = " ".join((ROOT / "docs" / "install.md").read_text().split())
    assert "make image VARIANT=cuda" in page and "itself was not built" in page

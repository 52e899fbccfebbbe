"""Clients whose requirements clash with this project's: they run as programs in an environment of their own.

`make clients` puts it into the folder `clients` of the environment that runs the tests. Each module here is such a
program: it is given the server's address, prints one JSON object with what the client saw, and imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHON = Path(sys.prefix) / "clients" / "bin" / "python"
PATIENCE_S = 500  # a visit to the page takes 100 to 250 on a busy machine


def require(package: str) -> None:
    """Skips the test where the package cannot be had."""
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", find], check=False).returncode:
        pytest.skip(f"{package} is not there; `make clients` installs it where the package index has it")


def what_it_saw(program: str, url: str, *flags: str) -> dict[str, Any]:
    """Runs one of the programs against a server."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, HERE / f"{program}.py", url, *flags], capture_output=True, text=True, timeout=PATIENCE_S, env=environ
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen

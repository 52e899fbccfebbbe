"""The environment of a process that runs a module of this package."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

TITLE = "bough::"  # of an engine's processes, before their role


def child_environment() -> dict[str, str]:
    """The caller's environment, with the way to this very package: the caller may have found it by its own path."""
    home = str(Path(__file__).resolve().parents[2])
    if home == sysconfig.get_path("purelib"):  # found anyway, and before the standard library it could hide modules
        return dict(os.environ)
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{given}" if given else home}

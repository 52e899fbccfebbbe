"""Compiles the CPU kernels while Bough is installed, where there is a C compiler; without one, torch does their work.

An installation never fails for the kernels: what went wrong is said, and `bough build-kernels` can make up for it. They
are compiled in the tree, so that an editable installation has them; beside it where it cannot be written.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there only while it builds
    """Called by hatchling before it gathers the files of a wheel, or for an editable installation."""

    scratch: Path | None = None  # where the library lies until it is in the wheel, if not in the tree

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = Path(self.root) / "bough" / "native"
        build = _load(native / "build.py")
        if not os.access(native, os.W_OK):
            self.scratch = Path(tempfile.mkdtemp(prefix="bough-kernels-"))
        try:
            library = build.build(self.scratch or native)
        except (build.BuildError, OSError) as error:
            self.app.display_warning(f"The CPU kernels were not compiled, so torch does their work. {error}")
            return
        if self.scratch is None:
            build_data["artifacts"].append(f"bough/native/{library.name}")
        else:
            build_data["force_include"][str(library)] = f"bough/native/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _load(path: Path) -> ModuleType:
    """The module by its path: the package cannot be imported, its requirements are not installed here."""
    spec = importlib.util.spec_from_file_location("bough_native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

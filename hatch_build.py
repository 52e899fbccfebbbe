"""Compiles the CPU kernels while Bough is installed, where there is a C compiler; without one, torch does their work.

An installation never fails for the kernels: what went wrong is said, and `bough build-kernels` can make up for it. They
are compiled in the tree, so that an editable installation has them; beside it where it cannot be written.

`WHEEL_MACHINE` names another machine to build a wheel for, with a compiler for it in `CC`. A wheel's tag is the
oldest manylinux that has all symbols which the library needs, so that pip refuses it where it would not load.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

OLDEST = (2, 17)  # glibc of the oldest manylinux that Python 3.11 is made for
# What manylinux says that every system has, as PEP 600's policies list it.
EVERYWHERE = re.compile(rb"ld-linux\S*|lib(c|m|pthread|dl|rt|gcc_s)\.so\.\d+")


LINK = re.compile(r"\[([^\]]+)\]\((?!\w+://)([^)]+)\)")  # to a file of the repository, or within the page


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc]  # hatchling is there only while it builds
    """README.md as an index of packages shows it, where there are no other files: a link becomes text and file name."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = LINK.sub(as_text, (Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def as_text(link: re.Match[str]) -> str:
    text, target = link.groups()
    return text if target == text or target.startswith("#") else f"{text} ({target})"


class KernelsHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there only while it builds
    """Called by hatchling before it gathers the files of a wheel, or for an editable installation."""

    scratch: Path | None = None  # where the library lies until it is in the wheel, if not in the tree

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = Path(self.root) / "bough" / "native"
        build = _load(native / "build.py")
        if not os.access(native, os.W_OK):
            self.scratch = Path(tempfile.mkdtemp(prefix="bough-kernels-"))
        try:
            machine = os.environ.get("WHEEL_MACHINE") or platform.machine().lower()
            library = build.build(self.scratch or native, machine=machine)
        except (build.BuildError, OSError) as error:
            self.app.display_warning(f"The CPU kernels were not compiled, so torch does their work. {error}")
            return
        if self.scratch is None:
            build_data["artifacts"].append(f"bough/native/{library.name}")
        else:
            build_data["force_include"][str(library)] = f"bough/native/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library.read_bytes(), machine)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def platform_tag(library: bytes, machine: str) -> str:
    """Of a wheel with this ELF file. Names of libraries and versions of symbols stand in it between zero bytes."""
    versions = [(int(a), int(b)) for a, b in re.findall(rb"(?<=\0)GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", library)]
    needed = re.findall(rb"(?<=\0)(?:lib|ld-linux)[\w.+-]*\.so(?:\.\d+)+(?=\0)", library)
    if not versions or not all(EVERYWHERE.fullmatch(name) for name in needed):
        own = machine == platform.machine().lower()
        return re.sub(r"\W", "_", sysconfig.get_platform() if own else f"linux_{machine}")
    major, minor = max(OLDEST, *versions)
    return f"manylinux_{major}_{minor}_{machine}"


def _load(path: Path) -> ModuleType:
    """The module by its path: the package cannot be imported, its requirements are not installed here."""
    spec = importlib.util.spec_from_file_location("bough_native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

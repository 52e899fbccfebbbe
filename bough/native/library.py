"""Finds the compiled library and opens it with ctypes, once for each process.

It lies in the package's folder or, where that is not writable, in the folder of what Bough has made (`BOUGH_HOME`).
A library whose name does not hold the hash of the sources is not looked at. Signatures of functions are declared by the
modules that call them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

from bough.core.home import home
from bough.native.build import build, library_name

PACKAGE = Path(__file__).parent


def cache_folder() -> Path:
    """Where libraries go that have no place in the package."""
    return home() / "native"


def find_library() -> Path | None:
    """The library that was compiled of these sources."""
    name = library_name()
    return next((folder / name for folder in (PACKAGE, cache_folder()) if (folder / name).is_file()), None)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The open library; None where it was not compiled or cannot be opened here."""
    path = find_library()
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def why_absent() -> str:
    """What to tell where `load_library` gave nothing."""
    path = find_library()
    if path is None:
        return "they are not compiled (`bough build-kernels` does that)"
    return f"{path} cannot be opened here (`bough build-kernels` compiles it anew)"


def cpu_name() -> str:
    """The kind of CPU: the machine, and as bits of a number what the library found that it has."""
    library, machine = load_library(), platform.machine().lower()
    if library is None:
        return machine
    library.bough_cpu_features.restype = ctypes.c_uint
    return f"{machine}-{library.bough_cpu_features():x}"


def build_library() -> Path:
    """Compiles the library where it will be found."""
    folder = PACKAGE
    if not os.access(folder, os.W_OK):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    return build(folder)

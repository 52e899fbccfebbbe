"""Finds llama-cpp-python for `bough bench cpu`, or builds it: llama.cpp with the flags of this very machine.

Owns the folder `<home>/peers/llama-cpp-python-<version>`, a virtual environment of its own: nothing is ever installed
where Bough lives. A package that is already there, or one whose Python the user names, is used as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bough.core.errors import BoughError
from bough.loader import catalogue, fetch

VERSION = "0.3.36"
BUILD_TOOLS = ("cmake", "ninja", "scikit-build-core")
# Release code for this very CPU; nothing but the library is built. Threads, kernels and repacking stay as llama.cpp's
# makers have set them.
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_CURL=OFF",
)
# GCC 12's intrinsics tell its optimiser of 8 bytes of the 64 that configure the tiles of AMX, and of none that a tile
# is loaded from; llama.cpp built with them ends in an illegal instruction. Included before everything else, this says
# it all.
AMX_HEADER = """\
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_loadd
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" :: "m"(*(const char (*)[64])(config)) : "memory")
#define _tile_storeconfig(config) __asm__ volatile("sttilecfg %0" : "=m"(*(char (*)[64])(config)) :: "memory")
#define _tile_loadd(tile, base, stride) BOUGH_TILE_LOADD(tile, base, stride)
#define BOUGH_TILE_LOADD(tile, base, stride) \\
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile :: "r"((const void *)(base)), "r"((long)(stride)) : "memory")
#endif
"""
ASK_VERSION = "import llama_cpp; print(llama_cpp.__version__)"
LOG_TAIL = 15


class PeerError(BoughError):
    """llama.cpp cannot be had or does not run."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A Python that can import llama_cpp."""

    python: Path
    version: str


def peer_folder() -> Path:
    return catalogue.home() / "peers" / f"llama-cpp-python-{VERSION}"


def find_peer(python: str | None) -> Peer | None:
    """The Python that the user names, this one, or the one built earlier: the first that has the package."""
    if python is not None:
        version = _version_at(Path(python))
        if version is None:
            raise PeerError(f"{python} cannot import llama_cpp; leave --llama-python out, and it is built.")
        return Peer(Path(python), version)
    for candidate in (Path(sys.executable), _python_in(peer_folder())):
        version = _version_at(candidate)
        if version is not None:
            return Peer(candidate, version)
    return None


def build_peer() -> Peer:
    """Builds the package into a fresh environment, whole or not at all, and says how long that took."""
    folder = peer_folder()
    with fetch.locked(folder):
        found = _version_at(_python_in(folder))
        if found is not None:  # another process has built it meanwhile
            return Peer(_python_in(folder), found)
        print(
            f"Building llama-cpp-python {VERSION} for this CPU into {folder}: "
            "a few minutes on many cores, a quarter of an hour on two.",
            file=sys.stderr,
        )
        began = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _build_into(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        print(f"Built in {time.monotonic() - began:.0f} s.", file=sys.stderr)
    version = _version_at(_python_in(folder))
    if version is None:
        raise PeerError(f"llama-cpp-python was built into {folder}, but cannot be imported there.")
    return Peer(_python_in(folder), version)


def _build_into(folder: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)], {})
    pip = [str(_python_in(folder)), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # The tools go in first and the build is not isolated, so that what it is built with lies beside it.
    _run([*pip, *BUILD_TOOLS], {})
    header = folder / "amx.h"
    header.write_text(AMX_HEADER)
    environment = {
        "CFLAGS": f"-include {header}",
        "CXXFLAGS": f"-include {header}",
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "CMAKE_ARGS": " ".join(CMAKE_FLAGS),
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
    }
    source = ["--no-binary", "llama-cpp-python", "--no-build-isolation", f"llama-cpp-python=={VERSION}"]
    _run([*pip, "--no-cache-dir", *source], environment)  # a wheel built earlier may have had other flags


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-LOG_TAIL:])
        raise PeerError(f"Building llama-cpp-python failed; a C++ compiler and pip's index are needed:\n{tail}")


def _python_in(folder: Path) -> Path:
    return folder / "bin" / "python"


def _version_at(python: Path) -> str | None:
    """The package's version as that Python sees it; None where it has none."""
    if not python.exists():
        return None
    done = subprocess.run([str(python), "-P", "-c", ASK_VERSION], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None

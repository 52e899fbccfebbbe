"""Finds the compiled library and opens it with ctypes, once for each process.

It lies in the package's folder or, where that is not writable, in the folder of what Bough has made (`BOUGH_HOME`).
A library whose name does not hold the hash of the sources is not looked at. Signatures of functions are declared by the
modules that call them.
"""

import ctypes
import functools
import os
import platform
from pathlib import Path

from bough.core.errors import SettingsError
from bough.core.files import home
from bough.native.build import build, library_name

PACKAGE = Path(__file__).parent
AVX2, AVX512, NEON, AVX_VNNI, AMX = 1, 2, 4, 8, 16  # `enum bough_feature` of src/cpu.h
# The features that each set may use, the best last. The last feature of a row makes the set.
INSTRUCTION_SETS: dict[str, tuple[int, ...]] = {
    "plain": (),
    "neon": (NEON,),
    "avx2": (AVX_VNNI, AVX2),
    "avx512": (AVX_VNNI, AVX2, AVX512),
    "amx": (AVX_VNNI, AVX2, AVX512, AMX),
}


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
    """The kind of CPU: the machine, and as bits of a number the features in use."""
    library, machine = load_library(), platform.machine().lower()
    return machine if library is None else f"{machine}-{_features(library):x}"


def instruction_sets(library: ctypes.CDLL) -> list[str]:
    """The sets that can be used as things are, the best last."""
    features = _features(library)
    return [name for name, needs in INSTRUCTION_SETS.items() if not needs or features & needs[-1]]


def use_instruction_set(name: str) -> None:
    """Limits this process's kernels to a set; "auto" takes BOUGH_CPU_INSTRUCTION_SET or all that the CPU has."""
    if name == "auto":
        name = os.environ.get("BOUGH_CPU_INSTRUCTION_SET") or "auto"
    library = load_library()
    if library is None:
        if name != "auto":
            raise SettingsError(f"cpu_instruction_set {name} is for the native CPU kernels, but {why_absent()}.")
        return
    library.bough_cpu_allow(ctypes.c_uint(0xFFFFFFFF))
    if name == "auto":
        return
    known = instruction_sets(library)
    if name not in known:
        raise SettingsError(f"cpu_instruction_set must be auto or what this CPU has: {', '.join(known)}; got {name}.")
    library.bough_cpu_allow(ctypes.c_uint(sum(INSTRUCTION_SETS[name])))


def _features(library: ctypes.CDLL) -> int:
    library.bough_cpu_features.restype = ctypes.c_uint
    return int(library.bough_cpu_features())


def build_library() -> Path:
    """Compiles the library where it will be found."""
    folder = PACKAGE
    if not os.access(folder, os.W_OK):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    return build(folder)

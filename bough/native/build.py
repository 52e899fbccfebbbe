"""Compiles the C sources into one shared library with the system's own compiler.

Runs at installation, where nothing of Bough's requirements is there yet, and for `bough build-kernels`: so it imports
the standard library only. The library's name holds the hash of the sources and the machine it is for; one of another
name is simply not found, so that a stale library is never loaded.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
COMMON = (
    "-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall",
    "-pthread", "-include", str(SOURCES / "glibc.h"),
)  # fmt: skip
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512")
X86_FLAGS: dict[str, tuple[str, ...]] = {
    "avx2": AVX2,
    "avxvnni": (*AVX2, "-mavxvnni"),
    "avx512": AVX512,
    "amx": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mavx512vbmi"),
}
ARM_FLAGS: dict[str, tuple[str, ...]] = {"neon": ("-march=armv8.2-a+dotprod+fp16",)}
VARIANT_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": X86_FLAGS,
    "amd64": X86_FLAGS,
    "aarch64": ARM_FLAGS,
    "arm64": ARM_FLAGS,
}


class BuildError(Exception):
    """There is no compiler, or it refused; says what to do."""


def library_name(machine: str | None = None) -> str:
    """The file name of the library that these sources give."""
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.[ch]")), Path(__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"libbough-{sys.platform}-{machine or platform.machine().lower()}-{digest.hexdigest()[:16]}.so"


def compiler() -> str | None:
    """The C compiler to use: `CC`, which may be a command with arguments, or the first that is there."""
    commands = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    return next((command for command in commands if shutil.which(shlex.split(command)[0])), None)


def build(folder: Path, cc: str | None = None, machine: str | None = None) -> Path:
    """Compiles the library into `folder` and returns its path. It appears there whole or not at all, so that several
    processes may build at once. `cc` and `machine` are for compiling for another machine."""
    cc = cc or compiler()
    if cc is None:
        raise BuildError("There is no C compiler; install one (gcc or clang) and run `bough build-kernels`.")
    machine = machine or platform.machine().lower()
    target = folder / library_name(machine)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
        objects = _compile_all(cc, VARIANT_FLAGS.get(machine, {}), Path(scratch))
        made = Path(scratch) / target.name
        _call([*shlex.split(cc), "-shared", "-pthread", "-o", str(made), *map(str, objects), "-lm"])
        made.replace(target)
    for stale in folder.glob(f"libbough-{sys.platform}-{machine}-*.so"):
        if stale != target:
            stale.unlink(missing_ok=True)
    return target


def _compile_all(cc: str, variants: dict[str, tuple[str, ...]], scratch: Path) -> list[Path]:
    def compile_one(source: Path) -> Path:
        made = scratch / f"{source.stem}.o"
        for flags in _flags_to_try(source, variants):
            done = _call([*shlex.split(cc), *COMMON, *flags, "-c", str(source), "-o", str(made)], may_fail=bool(flags))
            if done:
                break
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sorted(SOURCES.glob("*.c"))))


def _flags_to_try(source: Path, variants: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """A variant's own flags; and none, with which it is empty, for compilers that do not know them."""
    tier = source.stem.rpartition("_")[2]
    if tier in variants:
        yield variants[tier]
    yield ()


def _call(command: list[str], may_fail: bool = False) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} could not be run: {error.strerror or error}.") from None
    if done.returncode and not may_fail:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.returncode == 0

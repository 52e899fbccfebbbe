"""Programs of some of the C sources, compiled for a sanitizer or for another machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from bough.native.build import SOURCES

RunDriver = Callable[[str, list[str]], str]  # driver and patterns of sources → what it printed


def build_driver(
    folder: Path, cc: list[str], variants: dict[str, tuple[str, ...]], driver: str, sources: list[str]
) -> str:
    """A program of a driver beside this file and of those sources of the library that match. Objects that are in the
    folder already are another driver's."""
    objects = []
    for source in sorted({path for pattern in sources for path in SOURCES.glob(pattern)}):
        flags = variants.get(source.stem.rpartition("_")[2], ())
        objects.append(str(folder / f"{source.stem}.o"))
        if not Path(objects[-1]).exists():
            subprocess.run([*cc, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    program = str(folder / Path(driver).stem)
    here = str(Path(__file__).with_name(driver))
    subprocess.run([*cc, f"-I{SOURCES}", here, *objects, "-lm", "-o", program], check=True)
    return program

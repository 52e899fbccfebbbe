"""Numbers that one process counts and every process of a server can add up.

To count is to add to a number in memory: no lock, no message. With several processes each has a file, mapped into its
memory, that it alone writes; whoever wants the totals reads all files. Numbers never move between processes in pieces:
a double is written whole, and a total that is a moment old is as true as any.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import MutableSequence
from pathlib import Path
from typing import cast

DOUBLE = 8  # bytes


class Counts:
    """`size` doubles, all zero. With a folder the counts of all processes that were given the same one belong together;
    `number` tells the processes apart."""

    def __init__(self, size: int, folder: Path | None = None, number: int = 0) -> None:
        self._size = size
        self._folder = folder
        memory = bytearray(size * DOUBLE) if folder is None else _map(folder / f"counts{number}", size * DOUBLE)
        self.cells: MutableSequence[float] = cast(MutableSequence[float], memoryview(memory).cast("d"))

    def totals(self) -> list[float]:
        """The sums over all processes."""
        if self._folder is None:
            return list(self.cells)
        rows = [array("d", content) for content in self._contents(self._folder)]
        return [sum(column) for column in zip(*rows, strict=True)]

    def _contents(self, folder: Path) -> list[bytes]:
        found = [path.read_bytes() for path in folder.glob("counts*")]
        return [content for content in found if len(content) == self._size * DOUBLE]  # others are just being made


def _map(path: Path, size: int) -> mmap.mmap:
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)

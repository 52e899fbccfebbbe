"""Gives the results between recorded operations their memory: those that are not needed at the same time share it.

Operations are numbered in order. A buffer is needed from the operation that writes it to the last one that reads it;
what the caller reads after the tape has run is kept to the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LINE = 64


@dataclass(slots=True, eq=False)
class Buffer:
    """Rows of float32, written by operation `first` and read up to `last`."""

    rows: int
    width: int
    on_logits: bool  # the rows are the tokens whose logits are asked for, not all
    first: int = -1
    last: int = -1

    @property
    def nbytes(self) -> int:
        return -(-self.rows * self.width * 4 // LINE) * LINE

    def used_by(self, operation: int) -> None:
        if self.first < 0:
            self.first = operation
        self.last = max(self.last, operation)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where each buffer begins in a common piece of memory of so many bytes."""

    offsets: dict[Buffer, int]
    nbytes: int


def arrange(buffers: Iterable[Buffer]) -> Arrangement:
    """Places buffers in the order in which they are written, each in the first gap that is wide enough."""
    offsets: dict[Buffer, int] = {}
    end = 0
    for buffer in sorted(buffers, key=lambda buffer: buffer.first):
        living = sorted(
            (offset, offset + other.nbytes) for other, offset in offsets.items() if other.last >= buffer.first
        )
        at = 0
        for begin, stop in living:
            if begin - at >= buffer.nbytes:
                break
            at = max(at, stop)
        offsets[buffer] = at
        end = max(end, at + buffer.nbytes)
    return Arrangement(offsets, end)

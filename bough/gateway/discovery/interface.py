"""What a source of workers tells the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class SourceChange:
    """A worker has come to be, or has gone."""

    kind: Literal["add", "remove"]
    url: str


class WorkerSource(Protocol):
    """Watches something that knows about workers."""

    def changes(self) -> AsyncIterator[SourceChange]:
        """Every change, the workers that are there at the start first. Goes on until it is closed."""
        ...

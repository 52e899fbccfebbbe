"""What a format is: how a stream of it is read, and what a call that is forced looks like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from bough.parsers.calls import Calls, read_blocks
from bough.parsers.source import Markers, Source, Steps


@dataclass(frozen=True, slots=True)
class Shape:
    """Where a call's arguments stand in the text; a grammar that forces a call is made of this. They are a JSON object,
    unless `argument` tells what stands before each of them, by name, and whether it is text."""

    begin: Callable[[str], str]  # what stands before the arguments of a tool by this name
    end: str
    before: str = ""  # around all calls
    between: str = ""
    after: str = ""
    argument: Callable[[str, bool], str] | None = None
    argument_end: str = ""
    trigger: str = ""  # what a model writes only to begin calls; empty where there is no such text

    @property
    def markers(self) -> list[str]:
        inside = [] if self.argument is None else [self.argument("x", True), self.argument_end]
        return [text for text in (self.before, self.begin("x"), *inside, self.end, self.between, self.after) if text]


class Framed(ABC):
    """A format that is made of messages with headers, and so tells thinking apart by itself."""

    shape: Shape | None

    @abstractmethod
    def read(self, source: Source, calls: Calls) -> Steps[None]:
        """A whole stream."""


class ToolFormat(Protocol):
    """A way to write calls."""

    @property
    def shape(self) -> Shape | None:
        """None for formats that no grammar is made for."""

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        """A whole stream."""


class BlockFormat(ABC):
    """A format whose calls stand in blocks, each behind a marker. Markers of `FRAMING` stand around text."""

    OPENING: Markers
    FRAMING: Collection[str] = ()
    shape: Shape | None = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_blocks(source, calls, self.OPENING, self.block, framing=self.FRAMING)

    @abstractmethod
    def block(self, source: Source, calls: Calls, marker: str) -> Steps[None]:
        """The block behind a marker."""

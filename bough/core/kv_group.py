"""Kinds of layers, by what of a sequence they keep. Light: model configurations are read without numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A kind of layers, by what of a sequence they keep: all tokens, a window of them, or a state that stands for all
    tokens before."""

    kind: Literal["full", "window", "state"] = "full"
    window: int | None = None  # tokens that a query of a window group sees, its own included

    def __post_init__(self) -> None:
        assert (self.kind == "window") == (self.window is not None)

    def row_pages(self, page_size: int) -> int:
        """The most pages that a row holds of a window or state group between two steps."""
        if self.window is None:
            return 1  # its state
        # Windows begin inside a page, and rows keep a page more than they read, to be cut back by some tokens.
        return -(-self.window // page_size) + 3


FULL_ATTENTION = KVGroup()

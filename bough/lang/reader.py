"""Follows the text of a state, or of one of its variables, while it grows."""

from __future__ import annotations

from typing import Any

from bough.lang.interpreter import Executor


class Reader:
    """What is new since it last looked."""

    def __init__(self, executor: Executor, name: str | None, *, outside: bool) -> None:
        """`outside`: it follows a running program from outside, to its end."""
        self._executor = executor
        self._outside = outside
        self._name = name
        self._slot = executor.slots.get(name) if name is not None else None
        self._version = -1
        self._shown = 0
        self.over = False

    @property
    def meta(self) -> Any:
        return None if self._slot is None else self._slot.meta

    def wait(self) -> Any:
        """A future that is done when there may be something to take."""
        return self._executor.news.since(self._version)

    def take(self) -> str:
        """What is new. Whether all is over is asked first: what comes in between is then found in the next turn."""
        self._version = self._executor.news.version
        program_over = self._executor.over(outside=self._outside)
        if self._name is not None and self._slot is None:
            self._slot = self._executor.slots.get(self._name)  # the program may not have come to it yet
        if self._name is None:
            self.over = program_over
            text = self._executor.document.text
        elif self._slot is None:
            self.over, text = program_over, ""
        else:
            self.over, text = self._slot.filled.done(), self._slot.partial
        piece = text[self._shown :]
        self._shown += len(piece)
        return piece

    def finish(self) -> None:
        """Raises if what was read will never be complete, or never come."""
        self._executor.raise_failure()
        if self._name is not None:
            self._executor.slot(self._name)

"""Where the threads of every process are, each line with the name of its process.

A process that is stuck can print its stacks, from within the signal, but cannot say who it is. So a child prints them
into a pipe of its own, and the parent, which knows it, passes them on. Owns the pipes' ends in the parent.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import Iterable

from bough.launch.spec import STACK_SIGNAL


class StackPipe:
    """The way of one child's stacks to the log of its parent."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()

    def close(self) -> None:
        """No child has come to be."""
        os.close(self._reading)
        os.close(self.writing)

    def follow(self, name: str) -> None:
        """The child has the writing end; what it writes goes to standard error until it ends."""
        os.close(self.writing)
        threading.Thread(target=self._relay, args=(name,), daemon=True, name="stacks").start()

    def _relay(self, name: str) -> None:
        with open(self._reading, errors="replace") as lines:
            _print_named(name, lines)


def print_stacks_when_told(writing: int) -> None:
    """In a child: its stacks go into its pipe whenever the parent signals, whatever its threads are at."""
    faulthandler.register(STACK_SIGNAL, file=writing, all_threads=True)


def print_own_stacks(name: str) -> None:
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        _print_named(f"{name} (pid {os.getpid()})", file)


def _print_named(name: str, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"{name}: {line}", end="", file=sys.stderr, flush=True)

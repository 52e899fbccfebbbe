"""Picks a sub-command by its first word. Knows where each command lives, and imports nothing of it.

Shared by `bough` and `bough bench`, which look and fail alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bough.core.errors import SettingsError

HELP_FLAGS = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command: the line it gets in the help, and the module to import when it is called."""

    summary: str
    module: str
    starts_engine: bool = False


@dataclass(frozen=True, slots=True)
class Menu:
    """The sub-commands of one program."""

    program: str
    about: str
    commands: Mapping[str, Command]
    flags: Mapping[str, str]  # flags that stand alone, with their help

    def pick(self, argv: Sequence[str]) -> Command:
        """The command that the first word names; an unknown word is an error that suggests the nearest."""
        word = argv[0]
        if word in self.commands:
            return self.commands[word]
        if word.startswith("-"):
            raise SettingsError(f"unknown flag {word}.{self._hint(word, [*HELP_FLAGS, *self.flags])}")
        raise SettingsError(f"unknown command {word!r}.{self._hint(word, self.commands)}")

    def help(self) -> str:
        width = max(map(len, [*self.commands, *self.flags, "-h, --help"])) + 2
        lines = [f"usage: {self.program} COMMAND …", "", self.about, "", "commands:"]
        lines += [f"  {name:<{width}}{command.summary}" for name, command in self.commands.items()]
        lines += ["", "options:", f"  {'-h, --help':<{width}}show this page"]
        lines += [f"  {flag:<{width}}{text}" for flag, text in self.flags.items()]
        return "\n".join([*lines, "", f"`{self.program} COMMAND --help` tells more about a command."])

    def _hint(self, word: str, known: Iterable[str]) -> str:
        return did_you_mean(word, known) or f" `{self.program} --help` lists them all."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known spelling, case aside; empty where nothing is near."""
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f" Did you mean {by_folded[near[0]]}?" if near else ""

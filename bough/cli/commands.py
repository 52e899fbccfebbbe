"""Sub-commands and their flags. `Menu` picks a command by its first word and imports nothing of it; `Parser` reads its
flags: no abbreviations, one line for a mistake, a suggestion for a misspelt flag."""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from bough.core.errors import SettingsError, nearest
from bough.core.files import table_beside

COMMANDS: dict[str, dict[str, str]] = table_beside(__file__, "commands.toml")
HELP_FLAGS = ("-h", "--help")
KEY = re.compile(r"((?:^|\0)--[\w-]*api[-_]key[\0=])[^\0]*")  # in words with zeros between them


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command: the line it gets in the help, and the module to import when it is called."""

    summary: str
    module: str


def commands_of(kind: str, package: str, more: str = "") -> dict[str, Command]:
    """Those of a table, whose modules are in the package; the help says `more` of them."""
    return {name: Command(text + more, f"{package}.{name.replace('-', '_')}") for name, text in COMMANDS[kind].items()}


@dataclass(frozen=True, slots=True)
class Menu:
    program: str
    about: str
    commands: Mapping[str, Command]
    flags: Mapping[str, str]  # flags that stand alone, with their help

    def pick(self, argv: Sequence[str]) -> Command:
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
        return "\n".join([*lines, "", f"`{self.program} COMMAND --help` describes a command."])

    def _hint(self, word: str, known: Iterable[str]) -> str:
        return did_you_mean(word, known) or f" `{self.program} --help` lists them all."


def without_keys(words: Sequence[str]) -> list[str]:
    """A command line whose keys cannot be read."""
    return KEY.sub(r"\1***", "\0".join(words)).split("\0")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known spelling, case aside; empty where nothing is near."""
    return f" Did you mean {near}?" if (near := nearest(word, known)) else ""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose complaints fit on one line; the usage of a command with forty flags does not."""

    def __init__(
        self,
        *,
        program: str,
        about: str,
        usage: str = "",
        takes_text: bool = False,
        subcommands: Sequence[str] = (),
        other_flags: str = "",
    ) -> None:
        words = " ".join(filter(None, (program, usage)))
        super().__init__(prog=program, description=about, usage=f"{words} [options]", allow_abbrev=False)
        self._takes_text = takes_text  # so a word too many is most likely the rest of one
        self._subcommands = subcommands
        self._other_flags = other_flags  # where flags that are not this command's belong

    def add_flags(self, section: argparse._ActionsContainer | None = None, **more: Mapping[str, Any]) -> None:
        """Those that `flags.toml` has for this command."""
        from bough.core.setting_checks import add_flags  # which reads a table that menus do without

        add_flags(section or self, table_beside(__file__, "flags.toml")[self.prog], more)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The parsed flags; an unknown one ends the command with the nearest known spelling."""
        parsed, unknown = self.parse_known_args(list(argv))
        for word in unknown:
            if word.startswith("-"):
                from bough.core.setting_checks import OURS  # which reads a table that menus do without

                flag = word.partition("=")[0]
                shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
                known = [each for action in shown for each in action.option_strings]
                own = OURS.get(flag[2:].replace("-", "_"))
                asked = flag if own is None else "--" + own.replace("_", "-")
                hint = did_you_mean(asked, known) or f" `{self.prog} --help` lists them all.{self._other_flags}"
                self.error(f"unknown flag {flag}.{hint}")
        if unknown:
            self.error(f"unexpected {unknown[0]!r}{self._advice(unknown[0])}")
        return parsed

    def _advice(self, word: str) -> str:
        if self._takes_text:
            return "; put quotes around text that holds spaces."
        if word in self._subcommands:
            return f"; put it first: `{self.prog} {word}`."
        return f".{did_you_mean(word, self._subcommands) or f' `{self.prog} --help` lists what there is.'}"

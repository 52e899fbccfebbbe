"""Argument parsing as `bough` wants it: no abbreviations, one line for a mistake, a suggestion for a misspelt flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from bough.cli.commands import did_you_mean


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

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The parsed flags; an unknown one ends the command with the nearest known spelling."""
        parsed, unknown = self.parse_known_args(list(argv))
        for word in unknown:
            if word.startswith("-"):
                flag = word.partition("=")[0]
                hint = did_you_mean(flag, self._flags()) or f" `{self.prog} --help` lists them all.{self._other_flags}"
                self.error(f"unknown flag {flag}.{hint}")
        if unknown:
            self.error(f"unexpected {unknown[0]!r}{self._advice(unknown[0])}")
        return parsed

    def _advice(self, word: str) -> str:
        """What to do about a word for which there is no place."""
        if self._takes_text:
            return "; put quotes around text that holds spaces."
        if word in self._subcommands:
            return f"; put it first: `{self.prog} {word}`."
        return f".{did_you_mean(word, self._subcommands) or f' `{self.prog} --help` lists what there is.'}"

    def _flags(self) -> list[str]:
        return [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]

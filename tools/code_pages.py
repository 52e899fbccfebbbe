"""Pages of the site that are read out of the program: every sentence that it refuses with, and every command's flags.

Sentences are found in the source, so one that is new is on its page at once; `…` stands for what differs.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bough.cli.bench import MENU as BENCHMARKS
from bough.cli.commands import Parser
from bough.cli.gateway import CLIENT_COMMANDS
from bough.cli.main import MENU, main
from bough.core.settings import ALIASES, all_fields

PACKAGE = Path(importlib.import_module("bough").__path__[0])
# What users and clients meet, by class.
MEANINGS = {
    "SettingsError": "a flag, a variable or a file of settings cannot be used; the command ends with code 2",
    "ModelError": "the model cannot be found, read or served; the command ends with code 1",
    "ResourceError": "the machine has too little of something; the command ends with code 1",
    "RequestError": "a request is refused with 400, and the field is named",
    "PatternError": "a regular expression of a request is refused with 400",
    "HttpError": "the server or the gateway answers with another status",
    "Failure": "the server refuses before a route is found",
    "EngineDeadError": "a process of the engine is gone; every stream ends with it",
    "RankLostError": "a rank of the engine is gone; every stream ends with it",
    "ProgramError": "a program of the frontend language has failed, at the line that it names",
    "BoughError": "a command has failed and ends with code 1",
    "BuildError": "the CPU kernels could not be compiled; torch does their work",
}
ERRORS = {name: int(name in ("HttpError", "Failure")) for name in MEANINGS}  # which argument is the sentence
SHORTEST = 12  # characters: less is part of a sentence


# ---- sentences


def text_of(node: ast.expr | None, names: dict[str, ast.expr]) -> str:
    """What an expression says, with … for what is known only when it is said; empty where all of it is."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, names) for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)) if name in names:
            return text_of(names[name], {other: value for other, value in names.items() if other != name}) or "…"
        case ast.FormattedValue():
            return "…"
        case ast.IfExp(body=body):
            return text_of(body, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (text_of(left, names) or "…") + (text_of(right, names) or "…")
        case ast.Name(id=name) if name in names:
            return text_of(names[name], {other: value for other, value in names.items() if other != name})
    return ""


def sentences() -> Iterator[tuple[str, str, str]]:
    """Of each error that the code raises or makes: its class, the room, and the sentence."""
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            inside = list(ast.walk(function))
            named = [
                (node.targets[0].id, node.value)
                for node in inside
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            ]
            for node in inside:
                kind = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
                for said in _said(node, ERRORS[kind], named) if kind in ERRORS else ():
                    if len(said.replace("…", "")) >= SHORTEST:
                        yield kind, room, " ".join(said.split())


def _said(call: Any, place: int, named: list[tuple[str, ast.expr]]) -> Iterator[str]:
    """The sentence of a call; all that it may be, where its name is given several."""
    given = call.args[place] if len(call.args) > place else None
    last = dict(named)
    if isinstance(given, ast.Name) and given.id in last:
        yield from (text_of(value, last) for name, value in named if name == given.id)
    else:
        yield text_of(given, last)


def errors_page() -> str:
    lines = [
        "# Error sentences",
        "",
        "This page is made of the code: the sentences that commands, servers and gateways",
    ]
    lines += [
        "refuse with. `…` stands for what differs. A sentence names its cause, and mostly the way out; those that"
    ]
    lines += ["people meet most are explained in [troubleshooting](troubleshooting.md)."]
    found = sorted(set(sentences()))
    for kind, about in MEANINGS.items():
        mine = [(room, said) for each, room, said in found if each == kind]
        if mine:
            lines += ["", f"## {kind}", "", f"{about[0].upper()}{about[1:]}."]
        for room, group in itertools.groupby(mine, key=lambda pair: pair[0]):
            lines += ["", f"In `bough/{room}`:", "", *(f"- {_code(said)}" for _, said in group)]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """As code, so that nothing of it is read as Markdown; longer quotes than any inside it."""
    quotes = "``" if "`" in text else "`"
    return f"{quotes} {text} {quotes}" if "`" in text else f"`{text}`"


# ---- commands


class Found(Exception):
    def __init__(self, parser: Parser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(*words: str) -> Parser:
    """The parser that a command makes, which it would now parse its flags with."""

    def stop(self: Parser, argv: Any) -> None:
        raise Found(self)

    with mock.patch.object(Parser, "parse", stop):
        try:
            main(words)
        except Found as found:
            return found.parser
    raise ValueError(f"`bough {' '.join(words)}` reads no flags.")


def commands() -> list[tuple[str, ...]]:
    """In a checkout, so the benchmarks of parts are there too."""
    plain = [(name,) for name in MENU.commands if name != "bench"]
    more = [("gateway", name) for name in CLIENT_COMMANDS] + [("bench", name) for name in BENCHMARKS.commands]
    return sorted([*plain, *more])


def commands_page() -> str:
    shared = {"--" + name.replace("_", "-") for name in (*(f.name for _, f in all_fields()), *ALIASES)} | {"--help"}
    lines = ["# Commands", "", "This page is made of the code. Commands that start an engine take"]
    lines += ["[its flags](settings.md) as well; their tables have only what is a command's own."]
    for words in commands():
        parser = parser_of(*words)
        starts = "--mem-fraction-static" in parser._option_string_actions
        left_out = shared if starts else {"--help"}
        own = [a for a in parser._actions if a.help != argparse.SUPPRESS and not {*a.option_strings} & left_out]
        about = " ".join((parser.description or "").split()).rstrip(".") + "."
        lines += ["", f"## bough {' '.join(words)}", "", about]
        if starts:
            lines += ["", "It starts an engine or a server: [its flags](settings.md) too."]
        if own:
            lines += ["", "| flag | default | |", "|---|---|---|", *map(_row, own)]
    return "\n".join(lines) + "\n"


def default_cell(value: Any) -> str:
    """A default as a cell of a table. 0 and 1 are numbers, although Python has them equal to False and True."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{' '.join(map(str, value))}`" if isinstance(value, list | tuple) else f"`{value}`"


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    default = (
        "" if action.default is False or action.default in ([], argparse.SUPPRESS) else default_cell(action.default)
    )
    about = ((action.help or "") % {"default": action.default}).replace("|", "\\|")
    choices = ", ".join(f"`{each}`" for each in action.choices or ())
    return f"| {names} | {default} | {': '.join(filter(None, (about, choices)))} |"

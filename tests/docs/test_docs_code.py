"""Blocks of code on all pages: they parse, their commands and flags exist, their requests are JSON."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import bough
from bough.cli.commands import Parser
from bough.cli.main import main
from tools.site import PAGES, ROOT

SOURCES = [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PLACEHOLDERS = {"…", "...", "[MODEL]"}
JOINTS = re.compile(r"^(&&|\|\|?|;|&|>|>>|2>&1|\(|\))$")


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for path in SOURCES:
        for _, language, text in FENCE.findall(path.read_text()):
            yield Block(str(path.relative_to(ROOT)), language, textwrap.dedent(text))


BLOCKS = list(blocks())


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def whole_lines(text: str) -> Iterator[str]:
    """Lines of shell; one that goes on with a backslash or inside quotes is one with the next."""
    begun = ""
    for line in text.replace("\\\n", " ").splitlines():
        begun += line + "\n"
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            continue
        yield begun
        begun = ""
    assert not begun, f"quotes that do not end: {begun}"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of `bough` in a block of shell, with its page."""
    for block in of("sh", "bash"):
        for line in whole_lines(block.text):
            call: list[str] = []
            for word in [*shlex.split(line, comments=True), "&&"]:
                if JOINTS.match(word):
                    while call and re.match(r"[A-Z_]+=", call[0]):
                        call = call[1:]
                    if call and Path(call[0]).name == "bough":
                        yield block.page, [each for each in call[1:] if each not in PLACEHOLDERS]
                    call = []
                else:
                    call.append(word)


COMMANDS = list(commands())


def test_there_is_code_to_look_at() -> None:
    assert {block.language for block in BLOCKS} == {"", "bash", "json", "python", "sh", "toml", "ts", "yaml"}
    assert len(of("python")) > 25 and len(of("sh", "bash")) > 75 and len(COMMANDS) >= 90


def test_programs_parse_and_name_what_bough_has() -> None:
    for block in of("python"):
        tree = compile(block.text, block.page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        aliases = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "bough"
        }
        named = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
        }
        assert not [name for name in named if not hasattr(bough, name)], block.page


def test_data_parses() -> None:
    for block in of("json", "yaml", "toml"):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        else:
            assert list(yaml.safe_load_all(block.text)), block.page


def test_the_shell_can_read_every_command_and_bodies_are_json() -> None:
    for block in of("sh", "bash"):
        text = block.text.replace("<this repository>", "URL")
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.page}: {done.stderr}"
        for body in re.findall(r"-d '(\{.*?\})'", text, re.DOTALL):
            json.loads(body)


class Parsed(Exception):
    """The command line was taken."""


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_every_command_of_a_page_is_one_that_bough_takes(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Parser.parse

    def parse(self: Parser, argv: list[str]) -> None:
        real(self, argv)
        raise Parsed

    monkeypatch.setattr(Parser, "parse", parse)
    for words in (words for named, words in COMMANDS if named == page):
        if words and words[0] not in ("--help", "--version"):
            with pytest.raises(Parsed):
                main(words)

"""Rules in the grammar language of llguidance, and patterns between slashes.

Its lexer reads the longest text that any lexeme in question matches. Where a grammar says what its tokens are (`Token`,
`Text`), these are the lexemes; elsewhere it is read a character at a time, so that no lexeme swallows what another rule
should read. Patterns that hold together are joined by the library itself, while it reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from bough.constrained import charsets
from bough.constrained.ebnf import ROOT
from bough.constrained.pattern_tree import (
    RAW_IN_JSON,
    Chars,
    Choice,
    JsonNumber,
    Meet,
    Node,
    Reference,
    Repeat,
    Row,
    Text,
    Token,
    choice,
    in_json,
    literal,
    pattern_text,
    quantifier,
)
from bough.constrained.regexes import parse_regex

CHARACTER = choice([Chars(RAW_IN_JSON), parse_regex('\\\\(?:["\\\\/bfnrt]|u[0-9A-CE-F][0-9A-F]{3})')])
QUOTE = literal('"')


def lark_text(rules: Mapping[str, Node], prefix: str = "") -> str:
    """The rules; the one where a grammar begins is called `start`."""
    names = {name: prefix + ("start" if name == ROOT else f"r{index}") for index, name in enumerate(rules)}
    writer = _Writer(names, prefix)
    lines = [f"{names[name]}: {writer.write(node)}" for name, node in rules.items()]
    return "\n".join([*lines, *writer.more]) + "\n"


def lark_regex(pattern: str) -> str:
    """A pattern between slashes."""
    return f"/{pattern.replace('/', chr(92) + '/')}/" if pattern else '""'


class _Writer:
    """The rules of one grammar."""

    def __init__(self, names: Mapping[str, str], prefix: str) -> None:
        self.more: list[str] = []  # rules and terminals that the given ones lead to
        self._names = names
        self._prefix = prefix
        self._known: dict[Node, str] = {}

    def write(self, node: Node) -> str:
        match node:
            case Chars(found):
                return lark_regex(charsets.class_text(found, single=False))
            case Reference(name):
                return self._names[name]
            case Row(parts):
                return " ".join(map(self.write, parts)) if parts else '""'
            case Choice(options):
                return "(" + " | ".join(map(self.write, options)) + ")"
            case Repeat(part, least, most):
                return f"({self.write(part)}){quantifier(least, most)}"
            case Token(part):
                return lark_regex(pattern_text(part))
            case Text(Meet() as pattern):
                return self._joined(pattern)
            case Text(Repeat(Chars(charsets.ALL), least, most), free=True):
                return lark_regex(pattern_text(_quoted(Repeat(CHARACTER, least, most))))
            case Text(pattern):
                return lark_regex(pattern_text(_quoted(in_json(pattern))))
            case JsonNumber(schema):
                return f"%json {schema}"
            case Meet():
                raise TypeError("patterns are joined in a string only")

    def _joined(self, pattern: Meet) -> str:
        """A terminal of the strings that all of some patterns match and none of others."""
        if pattern not in self._known:
            self._known[pattern] = f"{self._prefix.upper()}TEXT{len(self._known)}"
            spelt = in_json(pattern)
            assert isinstance(spelt, Meet)
            texts = [lark_regex(pattern_text(_quoted(part))) for part in (*spelt.all_of, *spelt.none_of)]
            signs = ["" for _ in spelt.all_of] + ["~" for _ in spelt.none_of]
            joined = " & ".join(sign + text for sign, text in zip(signs, texts, strict=True))
            self.more.append(f"{self._known[pattern]}: {joined}")
        return self._known[pattern]


def _quoted(node: Node) -> Node:
    return Row((QUOTE, node, QUOTE))

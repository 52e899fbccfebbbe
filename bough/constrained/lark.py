"""Rules in the grammar language of llguidance, and patterns between slashes.

Its lexer reads the longest text that any lexeme in question matches. Where a grammar says what its tokens are (`Token`,
`Text`), these are the lexemes; elsewhere it is read a character at a time, so that no lexeme swallows what another rule
should read. Patterns that hold together are joined by the library itself, while it reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from bough.constrained import charsets
from bough.constrained.automaton_forms import quoted, regular
from bough.constrained.dfa import Dfa
from bough.constrained.ebnf import ROOT
from bough.constrained.pattern_tree import (
    Chars,
    Choice,
    Meet,
    Node,
    Reference,
    Repeat,
    Row,
    Text,
    Token,
    in_json,
    pattern_text,
    quantifier,
)


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
            case Text():
                return lark_regex(pattern_text(regular(node)))
            case Dfa():
                return self._machine(node)
            case Meet():
                raise TypeError("patterns are joined in a string only")

    def _joined(self, pattern: Meet) -> str:
        """A terminal of the strings that all of some patterns match and none of others."""
        if pattern not in self._known:
            self._known[pattern] = f"{self._prefix.upper()}TEXT{len(self._known)}"
            spelt = in_json(pattern)
            assert isinstance(spelt, Meet)
            texts = [lark_regex(pattern_text(quoted(part))) for part in (*spelt.all_of, *spelt.none_of)]
            signs = ["" for _ in spelt.all_of] + ["~" for _ in spelt.none_of]
            joined = " & ".join(sign + text for sign, text in zip(signs, texts, strict=True))
            self.more.append(f"{self._known[pattern]}: {joined}")
        return self._known[pattern]

    def _machine(self, dfa: Dfa) -> str:
        """A rule for each state of an automaton."""
        if dfa not in self._known:
            self._known[dfa] = name = f"{self._prefix}m{len(self._known)}_"
            for state, row in enumerate(dfa.edges):
                ways = [f"{self.write(Chars(found))} {name}{target}" for found, target in row]
                ways += ['""'] if state in dfa.accepting else []
                self.more.append(f"{name}{state}: {' | '.join(ways)}")
        return self._known[dfa] + "0"

"""Rules as xgrammar reads them, in the form in which its masks are cheap.

What the library cannot decide from a rule alone it tries while generating, slowly. So a string is written as an
automaton, a rule for each state, each with what follows such a token in JSON (`(= …)`): no text is read in two ways.
(Written as one expression, strings with a `maxLength` of 40 have masks that take a hundred times as long.)
"""

from collections.abc import Iterator, Mapping

from bough.constrained import charsets
from bough.constrained import pattern_tree as pt
from bough.constrained.automata import TooLarge, deterministic
from bough.constrained.charsets import Ranges
from bough.constrained.ebnf import ROOT
from bough.constrained.pattern_tree import Node

FOLLOWS = r" (= [ \t\n\r]* [,:}\]])"
ESCAPE = "escape"
ANY_ESCAPE = rf'{ESCAPE} ::= ["\\/bfnrt] | "u" [0-9A-CE-F] [0-9A-F]{{3}}'


class Unwritable(Exception):
    """The rules have a part that xgrammar cannot be told."""


def ebnf_text(rules: Mapping[str, Node]) -> str:
    names = {name: ROOT if name == ROOT else f"r{index}" for index, name in enumerate(rules)}
    writer = _Writer(names)
    lines = [f"{names[name]} ::= {writer.rule(node, name == ROOT)}" for name, node in rules.items()]
    return "\n".join([*lines, *writer.more]) + "\n"


class _Writer:
    def __init__(self, names: Mapping[str, str]) -> None:
        self.more: list[str] = []  # rules that the given ones lead to
        self._names = names
        self._known: dict[Node, str] = {}

    def rule(self, node: Node, is_last: bool) -> str:
        """The body of a rule; behind a token, what follows tokens, unless it is the whole text."""
        return f"({self.write(node)}){FOLLOWS}" if isinstance(node, pt.Token) and not is_last else self.write(node)

    def write(self, node: Node) -> str:
        match node:
            case pt.Chars(found):
                return charsets.class_text(found, single=False)
            case pt.Reference(name):
                return self._names[name]
            case pt.Row(parts):
                return " ".join(self._row(parts)) if parts else '""'
            case pt.Choice(options):
                return "(" + " | ".join(map(self.write, options)) + ")"
            case pt.Repeat(part, least, most):
                return f"({self.write(part)}){pt.quantifier(least, most)}"
            case pt.Token(part):
                return self.write(part)
            case pt.Text():
                return self._text(node)
            case pt.JsonNumber():
                raise Unwritable
            case pt.Meet():
                raise TypeError("patterns are joined in a string only")

    def _row(self, parts: tuple[Node, ...]) -> Iterator[str]:
        """The parts of a row, single characters that follow each other as one literal."""
        text = ""
        for part in parts:
            char = pt.only_char(part)
            if char is not None:
                text += char
                continue
            if text:
                yield _quoted(text)
                text = ""
            yield self.write(part)
        if text:
            yield _quoted(text)

    def _text(self, node: pt.Text) -> str:
        """A string: its states read characters as JSON spells them, and end with the quote."""
        if node not in self._known:
            try:
                dfa = deterministic(node.pattern)
            except TooLarge:
                return self._long(node)
            self._known[node] = name = f"s{len(self._known)}_"
            for state, row in enumerate(dfa.edges):
                ways = [r'"\""'] if state in dfa.accepting else []
                ways += [f"{way} {name}{to}" for found, to in row for way in self._spelt(found, node.free)]
                self.more.append(f"{name}{state} ::= ({' | '.join(ways)}){FOLLOWS}")
        return rf'"\"" {self._known[node]}0'

    def _long(self, node: pt.Text) -> str:
        """A string with too many states to be written out; without escapes, the library can count it by itself."""
        match node.pattern:
            case pt.Repeat(pt.Chars(charsets.ALL), least, most) if node.free:
                return rf'"\"" {_class(pt.RAW_IN_JSON)}{pt.quantifier(least, most)} "\""'
        raise Unwritable

    def _spelt(self, found: Ranges, free: bool) -> Iterator[str]:
        """How characters of a set are written in JSON; the sets of `in_json`, with what can be shared shared."""
        raw = charsets.intersection(found, pt.RAW_IN_JSON)
        if raw:
            yield _class(raw)
        if free and found == charsets.ALL:
            if ANY_ESCAPE not in self.more:
                self.more.append(ANY_ESCAPE)
            yield rf'"\\" {ESCAPE}'
            return
        letters = "".join(text[1] for code, text in pt.SHORT_ESCAPES.items() if charsets.holds(found, code))
        if letters:
            yield rf'"\\" {charsets.class_text(charsets.characters(letters), single=False)}'
        if not raw:
            rest = (code for code in range(0x20) if code not in pt.SHORT_ESCAPES and charsets.holds(found, code))
            yield from (_quoted(f"\\u{code:04x}") for code in rest)


def _class(found: Ranges) -> str:
    """A set of characters; one that holds nearly all is said by what it lacks, which the library reads quicker."""
    lacking = charsets.complement(found)
    if found[-1][1] == charsets.LAST and lacking and len(lacking) < len(found):
        return "[^" + charsets.class_text(lacking, single=False)[1:]
    return charsets.class_text(found, single=False)


def _quoted(text: str) -> str:
    chars = (f"\\{char}" if char in '"\\' else f"\\x{ord(char):02x}" if ord(char) < 0x20 else char for char in text)
    return f'"{"".join(chars)}"'

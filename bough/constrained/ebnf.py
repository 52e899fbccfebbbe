"""Grammars in EBNF, as llama.cpp and xgrammar write it: read here and checked.

    root  ::= "(" items? ")"          # literals, references, groups, ? * + {2,5}
    items ::= [a-z]+ ("," [a-z]+)*    # classes; comments go to the end of the line

Reading it here gives one dialect and errors with a line number; it also shows which rules are recursive. A grammar that
is not becomes one regular expression, which every back end knows.
"""

import re
from collections.abc import Mapping

from bough.constrained import charsets
from bough.constrained import pattern_tree as pt
from bough.constrained.limits import require_positions
from bough.constrained.pattern_tree import Node
from bough.core.errors import RequestError

ROOT = "root"
MAX_NESTING = 100
MAX_INLINED = 5_000  # characters of a rule that is written out wherever it is named
TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\n]*)
      | (?P<defines>[A-Za-z_][\w.-]*)\s*::=
      | (?P<rule>[A-Za-z_][\w.-]*)
      | "(?P<literal>(?:[^"\\\n]|\\.)*)"
      | \[(?P<chars>\^?(?:[^\]\\]|\\.)*)\]
      | \{\s*(?P<counts>\d+\s*(?:,\s*\d*)?)\s*\}
      | (?P<mark>[()|?*+])""",
    re.VERBOSE | re.DOTALL,
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|.)", re.DOTALL)
MEMBER = re.compile(rf"({ESCAPE.pattern}|.)(?:-({ESCAPE.pattern}|.))?", re.DOTALL)  # of a class: one, or from and to

Rules = dict[str, Node]
Token = tuple[str, str, int]  # its kind, what it says, and where in the text it begins


def parse_ebnf(text: str, field: str = "ebnf") -> Rules:
    """The rules by name. Refused: what does not parse, refers to no rule, has no `root`, derives no text, or is too
    large."""
    rules = ending_rules(_Parser(text, field).rules())
    if ROOT not in rules:
        raise RequestError(f"{field} derives no text: the rule {ROOT!r} never comes to an end.", field=field)
    return rules


class _NotRegular(Exception):
    """A rule leads back to itself, or is too long to be repeated."""


def inline(rules: Rules) -> Node | None:
    """The grammar as one regular expression; None where it is none, or too long."""
    done: dict[str, Node] = {}

    def visit(node: Node, open_rules: frozenset[str]) -> Node:
        match node:
            case pt.Reference(name):
                if name in open_rules:
                    raise _NotRegular
                if name not in done:
                    done[name] = visit(rules[name], open_rules | {name})
                    if pt.positions(done[name]) > MAX_INLINED:
                        raise _NotRegular
                return done[name]
            case pt.Repeat(part, least, most):
                return pt.repeat(visit(part, open_rules), least, most)
            case pt.Row(parts):
                return pt.Row(tuple(visit(part, open_rules) for part in parts))
            case pt.Choice(options):
                return pt.choice(visit(option, open_rules) for option in options)
        assert isinstance(node, pt.Chars), f"{type(node).__name__} is in no grammar that a client writes"
        return node

    try:
        return visit(pt.Reference(ROOT), frozenset())
    except _NotRegular:
        return None


def ending_rules(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules that derive some text, without options that derive none (`root ::= root`): a model that entered such a
    part could only run into a limit. Where no way is left, the root rule is missing."""
    ending: set[str] = set()
    order = list(rules)
    while True:
        before = len(ending)
        for name in order:
            if name not in ending and _cut_node(rules[name], ending) is not None:
                ending.add(name)
        if len(ending) == before:
            break
        order.reverse()  # rules mostly refer to earlier ones, or mostly to later ones
    cut = {name: _cut_node(rules[name], ending) for name in rules if name in ending}
    return {name: node for name, node in cut.items() if node is not None}


def _cut_node(node: Node, ending: set[str]) -> Node | None:
    """The node without options that never end; None if nothing is left."""
    match node:
        case pt.Reference(name):
            return node if name in ending else None
        case pt.Row(parts):
            kept = [_cut_node(part, ending) for part in parts]
            return None if None in kept else pt.Row(tuple(part for part in kept if part is not None))
        case pt.Choice(options):
            left = [cut for option in options if (cut := _cut_node(option, ending)) is not None]
            return pt.choice(left) if left else None
        case pt.Repeat(part, least, most):
            inner = _cut_node(part, ending)
            if inner is None:
                return pt.EMPTY if least == 0 else None
            return pt.Repeat(inner, least, most)
    return node


class _Parser:
    def __init__(self, text: str, field: str) -> None:
        self._field = field
        self._text = text
        self._tokens = self._split()
        self._at = 0
        self._used: dict[str, int] = {}  # by rule, where in the text it is named first

    def rules(self) -> Rules:
        found: Rules = {}
        while self._at < len(self._tokens):
            kind, name, place = self._tokens[self._at]
            if kind != "defines":
                raise self._error(place, f"a rule (name ::= …) is expected, not {name!r}")
            if name in found:
                raise self._error(place, f"the rule {name!r} is defined twice")
            self._at += 1
            found[name] = self._choice(0)
        if ROOT not in found:
            raise RequestError(f"{self._field} has no rule named {ROOT!r}, where a grammar begins.", field=self._field)
        for name, place in self._used.items():
            if name not in found:
                raise self._error(place, f"the rule {name!r} is not defined")
        require_positions(sum(map(pt.positions, found.values())), self._field)
        return found

    def _choice(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            raise RequestError(f"{self._field} is nested deeper than {MAX_NESTING} levels.", field=self._field)
        options = [self._row(depth)]
        while self._take("|"):
            options.append(self._row(depth))
        return pt.choice(options)

    def _row(self, depth: int) -> Node:
        parts: list[Node] = []
        while (part := self._part(depth)) is not None:
            part = self._repeated(part)
            if part != pt.EMPTY:
                parts.append(part)
        return parts[0] if len(parts) == 1 else pt.Row(tuple(parts))

    def _part(self, depth: int) -> Node | None:
        kind, text, place = self._next()
        if kind in ("", "defines") or (kind == "mark" and text in ("|", ")")):
            return None
        self._at += 1
        match kind:
            case "literal":
                return pt.literal(_unescape(text))
            case "chars":
                return self._chars(text, place)
            case "rule":
                self._used.setdefault(text, place)
                return pt.Reference(text)
        if text == "(":
            inner = self._choice(depth + 1)
            if not self._take(")"):
                raise self._error(place, "a group is not closed")
            return inner
        raise self._error(place, f"{text!r} has nothing to repeat")

    def _repeated(self, part: Node) -> Node:
        while True:
            kind, text, place = self._next()
            bounds = {"?": (0, 1), "*": (0, None), "+": (1, None)}.get(text) if kind == "mark" else None
            if kind == "counts":
                low, comma, high = map(str.strip, text.partition(","))
                bounds = (int(low), int(high) if high else None if comma else int(low))
                if bounds[1] is not None and bounds[1] < bounds[0]:
                    raise self._error(place, f"{{{low}{comma}{high}}} counts backwards")
            if bounds is None:
                return part
            self._at += 1
            part = pt.repeat(part, *bounds)

    def _chars(self, text: str, place: int) -> Node:
        pairs = []
        for member in MEMBER.finditer(text.removeprefix("^")):
            low, high = (ord(_unescape(unit)) for unit in (member[1], member[2] or member[1]))
            if high < low:
                raise self._error(place, f"the class [{text}] has a range that runs backwards")
            pairs.append((low, high))
        found = charsets.ranges(pairs)
        found = charsets.complement(found) if text.startswith("^") else found
        if not found:
            raise self._error(place, "a class is empty")
        return pt.Chars(found)

    def _take(self, mark: str) -> bool:
        found = self._next()[:2] == ("mark", mark)
        self._at += found
        return found

    def _next(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("", "", len(self._text))

    def _split(self) -> list[Token]:
        tokens, at = [], 0
        while at < len(self._text):
            found = TOKEN.match(self._text, at)
            if found is None:
                raise self._error(at, f"{self._text[at : at + 20].splitlines()[0]!r} cannot be read")
            kind = str(found.lastgroup)
            if kind != "blank":
                tokens.append((kind, found[kind], at))
            at = found.end()
        return tokens

    def _error(self, place: int, reason: str) -> RequestError:
        line = self._text.count("\n", 0, place) + 1
        return RequestError(f"{self._field}, line {line}: {reason}.", field=self._field)


def _unescape(text: str) -> str:
    return ESCAPE.sub(lambda e: chr(int(e[0][2:], 16)) if e[0][2:] else ESCAPES.get(e[0][1], e[0][1]), text)

"""Writes a plain schema as grammar rules, the same for every back end; `ebnf_writer` and `lark` turn rules into text.

The libraries read schemas themselves, but not to the letter: xgrammar ignores keywords and rounds ranges, llguidance
allows excluded bounds. Each name, string, number and mark of JSON is a `Token`, for back ends with a lexer.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bough.constrained import charsets, numbers
from bough.constrained import pattern_tree as pt
from bough.constrained.automata import TooLarge, deterministic
from bough.constrained.ebnf import ROOT, Rules, ending_rules
from bough.constrained.pattern_tree import EMPTY, Chars, Node, Reference, Repeat, Row, Text, Token
from bough.constrained.regexes import parse_regex
from bough.core.errors import RequestError

Counts = tuple[int, int | None]  # how many members an object may have
BLANKS = Repeat(Token(Repeat(Chars(charsets.characters(" \t\n\r")), 1, None)), 0, 1)
CONSTANTS = {"null": Token(pt.literal("null")), "boolean": Token(pt.choice([pt.literal("true"), pt.literal("false")]))}


def schema_rules(plain: Mapping[str, Any], any_whitespace: bool, field: str = "json_schema") -> Rules:
    """The rules of all texts that the schema allows, in the fixed spacing or any; refused if no text ever ends."""
    writer = _Writer(plain.get("$defs", {}), any_whitespace)
    root = writer.write(plain)
    rules = ending_rules({ROOT: root, **writer.rules})
    if ROOT not in rules:
        raise RequestError(f"{field} allows no value that comes to an end.", field=field)
    return rules


class _Writer:
    def __init__(self, definitions: Mapping[str, Any], any_whitespace: bool) -> None:
        self.rules: Rules = {}
        self._definitions = definitions
        self._known: dict[str, Node] = {}  # by plain schema
        blank: Node = BLANKS if any_whitespace else EMPTY
        self._blank = blank
        self._comma = Row((blank, Token(pt.literal(",")), blank)) if any_whitespace else Token(pt.literal(", "))
        self._colon = Row((blank, Token(pt.literal(":")), blank)) if any_whitespace else Token(pt.literal(": "))

    def write(self, plain: Mapping[str, Any]) -> Node:
        if "$ref" in plain:
            return self._definition(plain["$ref"].rpartition("/")[2])
        if "anyOf" in plain:
            return pt.choice(map(self.write, plain["anyOf"]))
        if "enum" in plain:
            return Token(pt.choice(pt.literal(spelt(value)) for value in plain["enum"]))
        key = json.dumps(plain)
        if key not in self._known:
            self._known[key] = self._typed(plain)
        return self._known[key]

    def _definition(self, name: str) -> Node:
        rule = f"def.{name}"
        if rule not in self.rules:
            self.rules[rule] = EMPTY  # taken: it may lead back here
            self.rules[rule] = self.write(self._definitions[name])
        return Reference(rule)

    def _typed(self, plain: Mapping[str, Any]) -> Node:
        match plain.get("type"):
            case "object":
                return self._object(plain)
            case "array":
                return self._rule("array", self._array(plain))
            case "string":
                return self._rule("string", string_node(plain))
            case "integer" | "number":
                node = number_node(plain)
                assert node is not None, "lowering leaves no number that cannot be written"
                return self._rule("number", node)
            case str(kind):
                return CONSTANTS[kind]
        return self._anything()

    def _rule(self, kind: str, node: Node) -> Node:
        name = self._free(kind)
        self.rules[name] = node
        return Reference(name)

    def _free(self, kind: str) -> str:
        return f"{kind}{len(self.rules)}"

    # ---- anything

    def _anything(self) -> Node:
        if "any" not in self.rules:
            self.rules["any"] = EMPTY  # taken: what stands in it leads back here
            inner = Reference("any")
            scalars = [self.write({"type": name}) for name in ("string", "number", "boolean", "null")]
            items = self._around("[", self._listed(inner, 0, None), "]")
            members = self._around("{", self._listed(Row((Text(ANY_NAME), self._colon, inner)), 0, None), "}")
            self.rules["any"] = pt.choice([*scalars, self._rule("array", items), self._rule("object", members)])
        return Reference("any")

    # ---- arrays

    def _array(self, plain: Mapping[str, Any]) -> Node:
        first = [self.write(item) for item in plain.get("prefixItems", ())]
        least, most = plain.get("minItems", 0), plain.get("maxItems")
        if plain["items"] is False:
            rest: Node = EMPTY
        else:
            item = self.write(plain["items"])
            if not first:
                return self._around("[", self._listed(item, least, most), "]")
            room = None if most is None else max(0, most - len(first))
            rest = pt.repeat(Row((self._comma, item)), max(0, least - len(first)), room)
        for index in range(len(first) - 1, -1, -1):
            here = Row((self._comma, first[index], rest)) if index else Row((first[index], rest))
            rest = here if index < least else pt.repeat(here, 0, 1)
        return self._around("[", rest, "]")

    def _listed(self, item: Node, least: int, most: int | None) -> Node:
        if most == 0:
            return EMPTY
        more = pt.repeat(Row((self._comma, item)), max(0, least - 1), None if most is None else most - 1)
        several = Row((item, more))
        return several if least else pt.repeat(several, 0, 1)

    # ---- objects

    def _object(self, plain: Mapping[str, Any]) -> Node:
        name = self._free("object")
        self.rules[name] = EMPTY  # taken, before its members take others
        required = set(plain.get("required", ()))
        members = [
            Member(Row((Token(pt.literal(spelt(key))), self._colon, self.write(value))), key in required)
            for key, value in plain.get("properties", {}).items()
        ]
        others = self._others(plain)
        counts = plain.get("minProperties", 0), plain.get("maxProperties")
        if counts[0] <= sum(member.required for member in members) and counts[1] is None:
            inner, rules = _one_from_here_on(members, others, self._comma, name)
        else:
            inner, rules = _counted(members, others, counts, self._comma, name)
        self.rules |= rules
        self.rules[name] = self._around("{", inner, "}")
        return Reference(name)

    def _others(self, plain: Mapping[str, Any]) -> Node | None:
        """A property beside the named ones, by the classes of names that lowering tells apart (`x-names`)."""
        options = [
            Row((name_node(entry), self._colon, self.write(entry["value"]))) for entry in plain.get("x-names", ())
        ]
        return pt.choice(options) if options else None

    def _around(self, left: str, inner: Node, right: str) -> Node:
        return Row((Token(pt.literal(left)), self._blank, inner, self._blank, Token(pt.literal(right))))


# ---- the members of an object
#
# A member that may be missing changes which one is first, and so where a comma stands. Written in one piece, that grows
# with the square of the number of members. So rules say "one of these from here on, and what may follow it".


@dataclass(frozen=True, slots=True)
class Member:
    node: Node
    required: bool


def _one_from_here_on(members: Sequence[Member], others: Node | None, comma: Node, prefix: str) -> tuple[Node, Rules]:
    """Behind a comma stands one of the members from here on, so that a comma or a brace is all that can follow one."""
    rules: Rules = {}
    more = EMPTY if others is None else pt.repeat(Row((comma, others)), 0, None)
    one: Node | None = None if others is None else _row(others, more)
    then, needed = more, False
    for at in range(len(members) - 1, -1, -1):
        here = _row(members[at].node, then)
        needed = needed or members[at].required
        one = here if members[at].required or one is None else pt.choice([here, one])
        if at and not members[at - 1].required:  # it will be named twice: behind that member, and in its place
            rules[f"{prefix}.{at}"] = one
            one = Reference(f"{prefix}.{at}")
        then = _row(comma, one) if needed else pt.repeat(_row(comma, one), 0, 1)
    if one is None:
        return EMPTY, rules
    return one if needed else pt.repeat(one, 0, 1), rules


def _row(one: Node, other: Node) -> Node:
    parts = [part for node in (one, other) for part in (node.parts if isinstance(node, Row) else (node,))]
    return Row(tuple(parts))


def _counted(
    members: Sequence[Member], others: Node | None, counts: Counts, comma: Node, prefix: str
) -> tuple[Node, Rules]:
    """A rule for each place and number of members written so far; further ones are not told apart from enough."""
    least, most = counts
    enough = least if most is None else max(most, 1)
    rules: Rules = {}
    after = [_rest(others, least - written, most, written, comma) for written in range(enough + 1)]
    for at in range(len(members) - 1, -1, -1):
        here: list[Node | None] = []
        for written in range(enough + 1):
            options: list[Node] = []
            then = after[min(written + 1, enough)]
            if then is not None and (most is None or written < most):
                options.append(_row(_row(comma, members[at].node) if written else members[at].node, then))
            skipped = after[written]
            if skipped is not None and not members[at].required:
                options.append(skipped)
            here.append(_named(options, rules, f"{prefix}.{at}.{written}"))
        after = here
    assert after[0] is not None, "lowering leaves no object that cannot be written"
    return after[0], rules


def _rest(others: Node | None, missing: int, most: int | None, written: int, comma: Node) -> Node | None:
    """What may follow the named members, where so many are missing yet."""
    room = None if most is None else most - written
    if others is None or room == 0:
        return EMPTY if missing <= 0 else None
    missing = max(0, missing)
    if written:
        return pt.repeat(Row((comma, others)), missing, room)
    more = pt.repeat(Row((comma, others)), max(0, missing - 1), None if room is None else room - 1)
    return _row(others, more) if missing else pt.repeat(_row(others, more), 0, 1)


def _named(options: list[Node], rules: Rules, name: str) -> Node | None:
    if not options:
        return None
    node = pt.choice(options)
    if node == EMPTY or isinstance(node, Reference):
        return node
    rules[name] = node
    return Reference(name)


# ---- strings, numbers and names; lowering asks here too whether there is such a string or number at all

MAX_NAME = 48  # characters of a name that a further name must differ from it in
MAX_TOLD_APART = 400  # and of all names together
NAME_CHARS = charsets.difference(charsets.ALL, charsets.ranges([(0, 0x1F)]))  # nobody names a property by a newline
ANY_NAME = Repeat(Chars(NAME_CHARS), 0, None)


def spelt(value: Any) -> str:
    """A value as JSON, in the one spelling that it has here; only what has no UTF-8 is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if all(not "\ud800" <= char <= "\udfff" for char in text) else json.dumps(value)


def string_node(plain: Mapping[str, Any]) -> Text:
    """A string that patterns or lengths describe, or any."""
    patterns = [plain["pattern"]] if "pattern" in plain else [part["pattern"] for part in plain.get("allOf", ())]
    parts: list[Node] = [parse_regex(pattern) for pattern in patterns]
    if not parts or "minLength" in plain or "maxLength" in plain:
        parts.append(Repeat(Chars(charsets.ALL), plain.get("minLength", 0), plain.get("maxLength")))
    return Text(parts[0], free=not patterns) if len(parts) == 1 else Text(pt.Meet(tuple(parts)))


def has_text(text: Text) -> bool:
    """Whether there is such a string. Patterns that are too large to be joined here are left to llguidance."""
    try:
        return not isinstance(text.pattern, pt.Meet) or bool(deterministic(text.pattern).accepting)
    except TooLarge:
        return True


def all_names_but(names: Iterable[str]) -> Node:
    """Every name but these. Of many or long names only the beginnings are told apart, and none may begin so."""
    depth = MAX_NAME
    kept = {name[:depth] for name in names}
    while sum(map(len, kept)) > MAX_TOLD_APART and depth > 1:
        depth //= 2
        kept = {name[:depth] for name in kept}
    return _all_but(kept, depth)


def _all_but(names: set[str], depth: int) -> Node:
    firsts = sorted({name[0] for name in names if name})
    others = charsets.difference(NAME_CHARS, charsets.characters("".join(firsts)))
    options: list[Node] = [] if "" in names else [EMPTY]
    options.append(Row((Chars(others), ANY_NAME)))
    for first in firsts if depth > 1 else ():
        rest = {name[1:] for name in names if name[:1] == first}
        options.append(Row((Chars(charsets.characters(first)), _all_but(rest, depth - 1))))
    return pt.choice(options)


def name_node(entry: Mapping[str, Any]) -> Text:
    """The names of a class of properties: by all of some patterns, none of others, and none of some names."""
    parts = [parse_regex(pattern) for pattern in entry["all"]]
    without = [parse_regex(pattern) for pattern in entry["none"]]
    if entry["but"]:
        parts.append(all_names_but(entry["but"]))
    if without or not parts:
        parts.append(ANY_NAME)
    return Text(pt.Meet(tuple(parts), tuple(without)) if len(parts) > 1 or without else parts[0])


def number_node(plain: Mapping[str, Any]) -> Node | None:
    """A number of the kind that a plain schema describes; None where there is none."""
    found = numbers.Range(
        plain.get("exclusiveMinimum", plain.get("minimum")),
        plain.get("exclusiveMaximum", plain.get("maximum")),
        "exclusiveMinimum" in plain,
        "exclusiveMaximum" in plain,
    )
    if "multipleOf" in plain:
        return numbers.multiples(found, Fraction(str(plain["multipleOf"])), plain["type"] == "integer")
    pattern = numbers.whole(found) if plain["type"] == "integer" else numbers.decimal(found)
    return None if pattern is None else Token(pattern)

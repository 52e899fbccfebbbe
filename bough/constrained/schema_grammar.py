"""A plain schema as a grammar of ours: the same rules for every back end, which then says them in its own language.

The libraries could read the schema themselves, each in its own way: with names that slip past by an escape, with ranges
that are rounded, with keywords passed over. Written here, an answer is what the schema allows, whoever checks it; the
texts are the same ones under all back ends. What is said in JSON is a token (`Token`) each, for back ends with a lexer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bough.constrained import charsets
from bough.constrained.ebnf import ROOT, Rules
from bough.constrained.endings import ending_rules
from bough.constrained.object_grammar import Member, object_rules
from bough.constrained.pattern_tree import (
    EMPTY,
    Chars,
    Node,
    Reference,
    Repeat,
    Row,
    Text,
    Token,
    choice,
    literal,
    repeat,
)
from bough.constrained.scalar_grammar import ANY_NAME, name_node, number_node, spelt, string_node
from bough.core.errors import RequestError

BLANKS = Repeat(Token(Repeat(Chars(charsets.characters(" \t\n\r")), 1, None)), 0, 1)
CONSTANTS = {"null": Token(literal("null")), "boolean": Token(choice([literal("true"), literal("false")]))}


def schema_rules(plain: Mapping[str, Any], any_whitespace: bool, field: str = "json_schema") -> Rules:
    """The rules of all texts that the schema allows, in the fixed spacing or any; refused if no text ever ends."""
    writer = _Writer(plain.get("$defs", {}), any_whitespace)
    root = writer.write(plain)
    rules = ending_rules({ROOT: root, **writer.rules})
    if ROOT not in rules:
        raise RequestError(f"{field} allows no value that comes to an end.", field=field)
    return rules


class _Writer:
    """The rules of one schema in the making."""

    def __init__(self, definitions: Mapping[str, Any], any_whitespace: bool) -> None:
        self.rules: Rules = {}
        self._definitions = definitions
        self._known: dict[str, Node] = {}  # by plain schema
        blank: Node = BLANKS if any_whitespace else EMPTY
        self._blank = blank
        self._comma = Row((blank, Token(literal(",")), blank)) if any_whitespace else Token(literal(", "))
        self._colon = Row((blank, Token(literal(":")), blank)) if any_whitespace else Token(literal(": "))

    def write(self, plain: Mapping[str, Any]) -> Node:
        if "$ref" in plain:
            return self._definition(plain["$ref"].rpartition("/")[2])
        if "anyOf" in plain:
            return choice(map(self.write, plain["anyOf"]))
        if "enum" in plain:
            return Token(choice(literal(spelt(value)) for value in plain["enum"]))
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
            self.rules["any"] = choice([*scalars, self._rule("array", items), self._rule("object", members)])
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
            rest = repeat(Row((self._comma, item)), max(0, least - len(first)), room)
        for index in range(len(first) - 1, -1, -1):
            here = Row((self._comma, first[index], rest)) if index else Row((first[index], rest))
            rest = here if index < least else repeat(here, 0, 1)
        return self._around("[", rest, "]")

    def _listed(self, item: Node, least: int, most: int | None) -> Node:
        """Items with commas between them."""
        if most == 0:
            return EMPTY
        more = repeat(Row((self._comma, item)), max(0, least - 1), None if most is None else most - 1)
        several = Row((item, more))
        return several if least else repeat(several, 0, 1)

    # ---- objects

    def _object(self, plain: Mapping[str, Any]) -> Node:
        name = self._free("object")
        self.rules[name] = EMPTY  # taken, before its members take others
        required = set(plain.get("required", ()))
        members = [
            Member(Row((Token(literal(spelt(key))), self._colon, self.write(value))), key in required)
            for key, value in plain.get("properties", {}).items()
        ]
        others = self._others(plain)
        counts = plain.get("minProperties", 0), plain.get("maxProperties")
        inner, rules = object_rules(members, others, counts, self._comma, name)
        self.rules |= rules
        self.rules[name] = self._around("{", inner, "}")
        return Reference(name)

    def _others(self, plain: Mapping[str, Any]) -> Node | None:
        """A property beside the named ones, by the classes of names that lowering tells apart (`x-names`)."""
        options = [
            Row((name_node(entry), self._colon, self.write(entry["value"]))) for entry in plain.get("x-names", ())
        ]
        return choice(options) if options else None

    def _around(self, left: str, inner: Node, right: str) -> Node:
        return Row((Token(literal(left)), self._blank, inner, self._blank, Token(literal(right))))

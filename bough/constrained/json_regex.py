"""A plain schema as one regular expression, for the back end that knows nothing else.

What is recursive has been refused before. A place where anything may stand (`{}`, further properties) allows values
nested to a small depth: all of them valid, only not all that would be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bough.constrained import charsets
from bough.constrained.pattern_tree import EMPTY, RAW_IN_JSON, Chars, Node, Repeat, Row, choice, literal, repeat
from bough.constrained.regexes import parse_regex

ANY_DEPTH = 1
INTEGER = parse_regex("-?(?:0|[1-9][0-9]{0,14})")
NUMBER = parse_regex("-?(?:0|[1-9][0-9]{0,14})(?:\\.[0-9]{1,15})?(?:[eE][+-]?[0-9]{1,2})?")
CHARACTER = choice([Chars(RAW_IN_JSON), parse_regex('\\\\(?:["\\\\/bfnrt]|u[0-9A-CE-F][0-9A-F]{3})')])
QUOTE = literal('"')
BLANKS = Repeat(Chars(charsets.characters(" \t\n\r")), 0, None)


def schema_pattern(plain: Mapping[str, Any], any_whitespace: bool) -> Node:
    """The pattern of all texts that the schema allows, in the fixed spacing or any."""
    return _Writer(plain.get("$defs", {}), any_whitespace).write(plain)


class _Writer:
    def __init__(self, definitions: Mapping[str, Any], any_whitespace: bool) -> None:
        self._definitions = definitions
        blank = BLANKS if any_whitespace else EMPTY
        self._comma = Row((blank, literal(","), blank)) if any_whitespace else literal(", ")
        self._colon = Row((blank, literal(":"), blank)) if any_whitespace else literal(": ")
        self._blank = blank

    def write(self, plain: Mapping[str, Any]) -> Node:
        if "$ref" in plain:
            return self.write(self._definitions[plain["$ref"].rpartition("/")[2]])
        if "anyOf" in plain:
            return choice(map(self.write, plain["anyOf"]))
        if "enum" in plain:
            return choice(literal(json.dumps(value, ensure_ascii=False)) for value in plain["enum"])
        match plain.get("type"):
            case "object":
                return self._object(plain)
            case "array":
                return self._array(plain)
            case "string":
                return self._string(plain)
            case "integer":
                return INTEGER
            case "number":
                return NUMBER
            case "boolean":
                return choice([literal("true"), literal("false")])
            case "null":
                return literal("null")
        return self._anything(ANY_DEPTH)

    def _string(self, plain: Mapping[str, Any]) -> Node:
        if "pattern" in plain:
            return Row((QUOTE, parse_regex(plain["pattern"]), QUOTE))
        return Row((QUOTE, repeat(CHARACTER, plain.get("minLength", 0), plain.get("maxLength")), QUOTE))

    def _anything(self, depth: int) -> Node:
        plain = [self._string({}), NUMBER, literal("true"), literal("false"), literal("null")]
        if depth == 0:
            return choice(plain)
        inner = self._anything(depth - 1)
        members = self._listed(Row((self._string({}), self._colon, inner)), 0, None)
        return choice([*plain, self._around("[", self._listed(inner, 0, None), "]"), self._around("{", members, "}")])

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
        others = self._others(plain)
        started: Node = EMPTY if others is None else repeat(Row((self._comma, others)), 0, None)
        alone: Node = EMPTY if others is None else self._listed(others, 0, None)
        required = set(plain.get("required", ()))
        for name, value in reversed(plain.get("properties", {}).items()):
            member = Row((literal(json.dumps(name, ensure_ascii=False)), self._colon, self.write(value)))
            first = Row((member, started))  # this property is the first that is written
            later = Row((self._comma, member, started))
            if name in required:
                alone, started = first, later
            else:
                alone, started = choice([first, alone]), Row((repeat(Row((self._comma, member)), 0, 1), started))
        return self._around("{", alone, "}")

    def _others(self, plain: Mapping[str, Any]) -> Node | None:
        """A property beside the named ones; where some are named, others are left out: they might repeat a name."""
        if plain.get("properties"):
            return None
        for pattern, value in plain.get("patternProperties", {}).items():
            return Row((QUOTE, parse_regex(pattern), QUOTE, self._colon, self.write(value)))
        more = plain.get("additionalProperties", False)
        return None if more is False else Row((self._string({}), self._colon, self.write(more)))

    def _around(self, left: str, inner: Node, right: str) -> Node:
        return Row((literal(left), self._blank, inner, self._blank, literal(right)))

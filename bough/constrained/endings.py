"""Only what can come to an end: rules and schemas without the parts that never do.

`root ::= root` derives no text, and an object that must contain an object of its own kind has no last one. Whoever
entered such a part could only run into a limit. So these parts are taken out wherever there is another way, and where
there is none, the grammar is refused. Works on the rules of `ebnf` and on plain schemas (`schema_lowering`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bough.constrained.pattern_tree import EMPTY, Choice, Node, Reference, Repeat, Row, choice

Plain = dict[str, Any]
T = TypeVar("T")

# ---- rules


def ending_rules(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules that derive some text, each without the options that derive none."""
    ending = _grow(rules, lambda node, known: _cut_node(node, known) is not None)
    cut = {name: _cut_node(rules[name], ending) for name in rules if name in ending}
    return {name: node for name, node in cut.items() if node is not None}


def _cut_node(node: Node, ending: set[str]) -> Node | None:
    """The node without options that never end; None if nothing is left."""
    match node:
        case Reference(name):
            return node if name in ending else None
        case Row(parts):
            kept = [_cut_node(part, ending) for part in parts]
            return None if None in kept else Row(tuple(part for part in kept if part is not None))
        case Choice(options):
            left = [cut for option in options if (cut := _cut_node(option, ending)) is not None]
            return choice(left) if left else None
        case Repeat(part, least, most):
            inner = _cut_node(part, ending)
            if inner is None:
                return EMPTY if least == 0 else None
            return Repeat(inner, least, most)
    return node


# ---- plain schemas


def ending_schema(plain: Plain) -> Plain | None:
    """A plain schema without the parts that have no finite value; None if it has none itself."""
    definitions: dict[str, Plain] = plain.get("$defs", {})
    ending = _grow(definitions, lambda schema, known: _cut_schema(schema, known) is not None)
    whole = _cut_schema({key: value for key, value in plain.items() if key != "$defs"}, ending)
    if whole is None or not definitions:
        return whole
    cut = {name: _cut_schema(definitions[name], ending) for name in definitions if name in ending}
    return {**whole, "$defs": cut}


def _cut_schema(schema: Plain, ending: set[str]) -> Plain | None:
    if "$ref" in schema:
        return schema if schema["$ref"].rpartition("/")[2] in ending else None
    if "anyOf" in schema:
        left = [cut for option in schema["anyOf"] if (cut := _cut_schema(option, ending)) is not None]
        return {**schema, "anyOf": left} if left else None
    match schema.get("type"):
        case "object":
            return _cut_object(schema, ending)
        case "array":
            return _cut_array(schema, ending)
    return schema


def _cut_object(schema: Plain, ending: set[str]) -> Plain | None:
    cut = dict(schema)
    required = schema.get("required", ())
    if "properties" in schema:
        properties = {name: _cut_schema(value, ending) for name, value in schema["properties"].items()}
        if any(properties.get(name) is None for name in required if name in properties):
            return None
        cut["properties"] = {name: value for name, value in properties.items() if value is not None}
    if "patternProperties" in schema:
        patterns = {name: _cut_schema(value, ending) for name, value in schema["patternProperties"].items()}
        cut["patternProperties"] = {name: value for name, value in patterns.items() if value is not None}
    if isinstance(schema.get("additionalProperties"), dict):
        more = _cut_schema(schema["additionalProperties"], ending)
        cut["additionalProperties"] = False if more is None else more
    if "x-names" in schema:
        entries = [{**entry, "value": _cut_schema(entry["value"], ending)} for entry in schema["x-names"]]
        cut["x-names"] = [entry for entry in entries if entry["value"] is not None]
    others = any(cut.get(keyword) for keyword in ("x-names", "patternProperties"))
    others = others or cut.get("additionalProperties", True) is not False
    if not others and schema.get("minProperties", 0) > len(cut.get("properties", ())):
        return None
    return cut


def _cut_array(schema: Plain, ending: set[str]) -> Plain | None:
    least = schema.get("minItems", 0)
    first: list[Plain] = []
    for item in schema.get("prefixItems", ()):
        kept = _cut_schema(item, ending)
        if kept is None:
            return _array_of(schema, first) if least <= len(first) else None
        first.append(kept)
    rest = schema.get("items", {})
    more = _cut_schema(rest, ending) if isinstance(rest, dict) else rest
    if more is None:
        return _array_of(schema, first) if least <= len(first) else None
    return {**schema, **({"prefixItems": first} if first else {}), "items": more}


def _array_of(schema: Plain, first: list[Plain]) -> Plain:
    """An array of these items and no more."""
    most = min(schema.get("maxItems", len(first)), len(first))
    bare = {key: value for key, value in schema.items() if key != "prefixItems"}
    return {**bare, **({"prefixItems": first} if first else {}), "items": False, "maxItems": most}


def _grow(named: Mapping[str, T], ends: Callable[[T, set[str]], bool]) -> set[str]:
    """The names of what ends, found from those that need no other upwards."""
    known: set[str] = set()
    while found := {name for name, inner in named.items() if name not in known and ends(inner, known)}:
        known |= found
    return known

"""Whether a value is valid: the `jsonschema` library without what a hostile schema could abuse.

References are followed inside the schema only, patterns are matched in linear time, an enum is looked up instead of
searched, and steps are limited. Forms of earlier drafts are read as `schema_source` reads them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from jsonschema import Draft7Validator, Draft202012Validator, ValidationError, validators
from referencing import Registry
from referencing.exceptions import Unresolvable

from bough.constrained.automata import TooLarge, matches
from bough.constrained.regexes import PatternError, parse_regex

MAX_STEPS = 200_000  # keywords looked at, for all values of a schema together
COSTS = {"$ref": 20, "$dynamicRef": 20, "allOf": 5, "anyOf": 5, "oneOf": 5, "if": 5}  # steps that one of these takes
NEWER = Draft202012Validator.VALIDATORS
Keyword = Callable[[Any, Any, Any, Any], Iterator[Any]]


class Undecided(Exception):
    """No word on a value, and why: too many steps, or a pattern that no automaton can match."""


def same(value: Any) -> Any:
    """A key that equal JSON values share, and no others: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    if isinstance(value, list):
        return ("array", tuple(map(same, value)))
    if isinstance(value, dict):
        return ("object", frozenset((name, same(inner)) for name, inner in value.items()))
    return value


def found_in(pattern: str, text: str) -> bool:
    """Whether a pattern matches some part of a text, in time that grows with their lengths only."""
    try:
        return matches(parse_regex(pattern, search=True, field="pattern"), text)
    except PatternError as error:
        raise Undecided(f"has a pattern, {pattern!r}, that cannot be decided: {error.reason}") from None
    except TooLarge:
        raise Undecided(f"has a pattern, {pattern[:80]!r}, that is too large to be decided") from None


class Judge:
    def __init__(self, root: Any) -> None:
        self._left = MAX_STEPS
        self._enums: dict[int, frozenset[Any]] = {}
        keywords = {**NEWER, **OURS, "enum": self._enum}
        judged: Any = validators.extend(
            Draft202012Validator, {name: self._counted(check, COSTS.get(name, 1)) for name, check in keywords.items()}
        )  # type: ignore[no-untyped-call]
        judged.evolve = _evolve
        # Without a registry of ours the library would open the URL of any reference that it does not know.
        nothing_fetched: Registry[Any] = Registry()
        self._validator = judged(root, registry=nothing_fetched, format_checker=Draft202012Validator.FORMAT_CHECKER)
        self._parts: dict[int, Any] = {}  # by part of the schema

    def accepts(self, part: Any, value: Any) -> bool:
        if id(part) not in self._parts:
            self._parts[id(part)] = self._validator.evolve(schema=part)
        try:
            return bool(self._parts[id(part)].is_valid(value))
        except Unresolvable as error:
            named = getattr(error, "anchor", error.ref)
            raise Undecided(f"has a reference that leads out of the schema ({named})") from None
        except OverflowError:
            raise Undecided("has a number that is too large to be divided") from None

    def _counted(self, check: Keyword, cost: int) -> Keyword:
        def run(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._left -= cost
            if self._left < 0:
                raise Undecided("has too many values and combinations of subschemas to judge them; make it smaller")
            return check(validator, value, instance, schema)

        return run

    def _enum(self, validator: Any, enum: Any, instance: Any, schema: Any) -> Iterator[Any]:
        del validator, schema
        known = self._enums.get(id(enum))
        if known is None:
            known = self._enums[id(enum)] = frozenset(map(same, enum))
        if same(instance) not in known:
            yield ValidationError("is none of the values")


# ---- keywords


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    del validator, schema
    if isinstance(instance, str) and not found_in(pattern, instance):
        yield ValidationError("does not match")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    del schema
    if isinstance(instance, dict):
        for pattern, subschema in patterns.items():
            for name, value in instance.items():
                if found_in(pattern, name):
                    yield from validator.descend(value, subschema)


def _additional_properties(validator: Any, subschema: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        for name, value in instance.items():
            known = name in schema.get("properties", {})
            if not known and not any(found_in(pattern, name) for pattern in schema.get("patternProperties", {})):
                yield from validator.descend(value, subschema)


def _unevaluated(validator: Any, subschema: Any, instance: Any, schema: Any) -> Iterator[Any]:
    del validator, schema
    if isinstance(instance, dict | list) and instance and subschema not in (True, {}):
        raise Undecided("has an enum beside unevaluatedProperties or unevaluatedItems, which cannot be decided")
    yield from ()


def _items(validator: Any, items: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(items, list):
        yield from NEWER["items"](validator, items, instance, schema) or ()
    elif isinstance(instance, list):
        for item, subschema in zip(instance, items, strict=False):
            yield from validator.descend(item, subschema)
        for item in instance[len(items) :]:
            yield from validator.descend(item, schema.get("additionalItems", True))


def _required(validator: Any, required: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(required, list):
        yield from NEWER["required"](validator, required, instance, schema) or ()


def _bound(exclusive: str, plain: str) -> Keyword:
    def check(validator: Any, bound: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if bound is True and plain in schema:
            bound = schema[plain]
        if not isinstance(bound, bool):
            yield from NEWER[exclusive](validator, bound, instance, schema) or ()

    return check


OURS: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "unevaluatedProperties": _unevaluated,
    "unevaluatedItems": _unevaluated,
    "items": _items,
    "required": _required,
    "dependencies": Draft7Validator.VALIDATORS["dependencies"],
    "exclusiveMinimum": _bound("exclusiveMinimum", "minimum"),
    "exclusiveMaximum": _bound("exclusiveMaximum", "maximum"),
}


def _evolve(validator: Any, **changes: Any) -> Any:
    """The same validator over another part: the library's own would go on with one of its own at every `$schema`."""
    if not isinstance(changes.get("schema", True), dict | bool):
        raise Undecided(f"has a reference to what is not a schema ({changes['schema']!r:.80})")
    return attrs.evolve(validator, **changes)

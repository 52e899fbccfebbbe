"""The plain form of objects: named properties in their order, which of them must be there, and what else may be.

A schema that names properties and does not say whether there may be others is taken to mean these alone: such answers
are valid, and nobody who lists properties wants the model to invent more. `additionalProperties` says otherwise.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bough.constrained import charsets
from bough.constrained.limits import require_positions
from bough.constrained.pattern_tree import Chars, Repeat, positions
from bough.constrained.regexes import parse_regex
from bough.constrained.schema_parts import NO_KEYWORDS, Part, Parts, Plain, pattern_for, said
from bough.constrained.schema_source import join

if TYPE_CHECKING:
    from bough.constrained.schema_lowering import Lowering


def object_form(lowering: Lowering, parts: Parts, name: str) -> Plain | None:
    builder = _ObjectForm(lowering, parts)
    return builder.build(name)


class _ObjectForm:
    """One object in the making."""

    def __init__(self, lowering: Lowering, parts: Parts) -> None:
        self._lowering = lowering
        self._parts = parts
        self._required = list(
            dict.fromkeys(n for _, names in self._said("required") if isinstance(names, list) for n in names)
        )
        self._patterns = list(
            dict.fromkeys(pattern for _, patterns in self._said("patternProperties") for pattern in patterns)
        )
        named = (name for _, properties in self._said("properties") for name in properties)
        self._names = list(dict.fromkeys([*named, *self._required]))
        self._properties: dict[str, Plain] = {}
        self._closed = False

    def build(self, name: str) -> Plain | None:
        for property_name in self._names:
            value = self._lowering.lower(self._schemas_of(property_name)) if self._may_be(property_name) else None
            if value is not None:
                self._properties[property_name] = value
            elif property_name in self._required:
                return None
        others = self._others()
        plain: Plain = {"type": name, **others}
        if self._properties:
            plain = {"type": name, "properties": self._properties, "required": self._required, **others}
        if not self._counts(plain):
            return None
        self._note_gaps()
        return plain

    # ---- named properties

    def _schemas_of(self, name: str) -> list[Part]:
        """All that is said about the value of a property, in every part."""
        found = []
        for pointer, _ in self._parts:
            node = self._lowering.node((pointer, NO_KEYWORDS))
            mine = [join(pointer, "properties", name)] if name in node.get("properties", {}) else []
            mine += [
                join(pointer, "patternProperties", pattern)
                for pattern in node.get("patternProperties", {})
                if self._matches(pattern, name)
            ]
            if not mine and "additionalProperties" in node:
                mine = [join(pointer, "additionalProperties")]
            found += [(path, NO_KEYWORDS) for path in mine]
        return found

    def _matches(self, pattern: str, name: str) -> bool:
        try:
            return re.search(pattern, name) is not None
        except re.error as error:
            raise self._lowering.source.error("", f"has a pattern that is not valid, {pattern!r}: {error}") from None

    def _may_be(self, name: str) -> bool:
        """Whether `propertyNames` allows it."""
        accepts = self._lowering.source.accepts
        return all(accepts(join(pointer, "propertyNames"), name) for pointer, _ in self._said("propertyNames"))

    # ---- other properties

    def _others(self) -> Plain:
        """`additionalProperties` and `patternProperties` of the plain form."""
        said_more = any(True for _ in self._said("additionalProperties")) or bool(self._patterns)
        if self._names and not said_more:
            self._closed = True
            return {"additionalProperties": False}
        more = self._lowering.lower(
            [(join(pointer, "additionalProperties"), NO_KEYWORDS) for pointer, _ in self._said("additionalProperties")]
        )
        if any(True for _ in self._said("propertyNames")):
            return self._others_by_name(more)
        if self._patterns:
            return self._others_by_pattern(more)
        self._closed = more is None
        return {"additionalProperties": False if more is None else more}

    def _others_by_pattern(self, more: Plain | None) -> Plain:
        several = len(self._patterns) > 1 and not self._lowering.features.several_patterns
        if several:
            for pointer, patterns in self._said("patternProperties"):
                if set(patterns) & set(self._patterns[1:]):
                    self._lowering.gap(pointer, "patternProperties", "can be enforced with one pattern only")
        kept = self._patterns[:1] if several else self._patterns
        found = {pattern: self._lowering.lower(self._schemas_by_pattern(pattern)) for pattern in kept}
        written = {self._pattern(pattern): value for pattern, value in found.items() if value is not None}
        if not self._lowering.features.more_beside_patterns:
            more = None
            if any(self._matches(pattern, name) for pattern in kept for name in self._names):
                written = {}  # a named property might be written again under the pattern
        if None in found.values():
            written, more = {}, None  # a name that may have no value must not slip in under another pattern
        self._closed = not written and more is None
        result: Plain = {"additionalProperties": False if more is None else more}
        return {"patternProperties": written, **result} if written else result

    def _schemas_by_pattern(self, pattern: str) -> list[Part]:
        """What a property must satisfy whose name matches: the pattern's schema, or else what others are told."""
        found = []
        for pointer, _ in self._parts:
            node = self._lowering.node((pointer, NO_KEYWORDS))
            if pattern in node.get("patternProperties", {}):
                found.append((join(pointer, "patternProperties", pattern), NO_KEYWORDS))
            elif "additionalProperties" in node:
                found.append((join(pointer, "additionalProperties"), NO_KEYWORDS))
        return found

    def _others_by_name(self, more: Plain | None) -> Plain:
        """With `propertyNames`: names from a list become properties, a pattern of names becomes patternProperties."""
        paths = [(join(pointer, "propertyNames"), NO_KEYWORDS) for pointer, _ in self._said("propertyNames")]
        names = _strings_of(self._lowering.lower(paths))
        self._closed = True
        if names is None or more is None:
            return {"additionalProperties": False}
        if self._patterns:
            self._lowering.gap(
                paths[0][0].rpartition("/")[0], "propertyNames", "cannot be enforced beside patternProperties"
            )
            return {"additionalProperties": False}
        if "enum" in names:
            for name in names["enum"]:
                if isinstance(name, str) and name not in self._properties:
                    self._properties[name] = more
            return {"additionalProperties": False}
        self._closed = False
        if pattern := self._pattern_of(names):
            return {"patternProperties": {pattern: more}, "additionalProperties": False}
        return {"additionalProperties": more}

    def _pattern_of(self, names: Plain) -> str | None:
        """A pattern for names that are strings of a kind; None if any string will do."""
        if "pattern" in names:
            return str(names["pattern"])
        least, most = names.get("minLength", 0), names.get("maxLength")
        if not least and most is None:
            return None
        return pattern_for(self._lowering, Repeat(Chars(charsets.ALL), least, most))

    def _pattern(self, pattern: str) -> str:
        field = f"{self._lowering.source.field} (patternProperties)"
        tree = parse_regex(pattern, search=True, field=field)
        require_positions(positions(tree), field)
        return pattern_for(self._lowering, tree)

    # ---- counts and what is left

    def _counts(self, plain: Plain) -> bool:
        """Writes minProperties and maxProperties where they are not implied; False where they cannot hold."""
        least = max((int(value) for _, value in self._said("minProperties")), default=0)
        most = min((int(value) for _, value in self._said("maxProperties")), default=None)
        if most is not None and (most < len(self._required) or most < least):
            return False
        if self._closed and least > len(self._properties):
            return False
        if least > len(self._required):
            # Others may be written twice under one name, which counts once: only one of them is sure to count.
            if self._lowering.features.property_counts and (self._closed or least <= len(self._required) + 1):
                plain["minProperties"] = least
            else:
                self._gap_all("minProperties")
        if most is not None and not (self._closed and most >= len(self._properties)):
            if self._lowering.features.property_counts:
                plain["maxProperties"] = most
            else:
                self._gap_all("maxProperties")
        return True

    def _note_gaps(self) -> None:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for pointer, rules in self._said(keyword):
                if any(not self._settled(trigger, rule) for trigger, rule in rules.items()):
                    self._lowering.gap(pointer, keyword)
        for pointer, value in self._said("unevaluatedProperties"):
            if value is not True and value != {}:
                self._lowering.gap(pointer, "unevaluatedProperties")

    def _settled(self, trigger: str, rule: object) -> bool:
        """Whether a dependency holds by itself: nothing can trigger it, or what it asks for is asked for anyway."""
        if self._closed and trigger not in self._properties:
            return True
        return isinstance(rule, list) and set(rule) <= set(self._required)

    def _gap_all(self, keyword: str) -> None:
        for pointer, _ in self._said(keyword):
            self._lowering.gap(pointer, keyword)

    def _said(self, keyword: str) -> list[tuple[str, Any]]:
        return list(said(self._lowering, self._parts, keyword))


def _strings_of(plain: Plain | None) -> Plain | None:
    """What a schema says of strings: a property's name is one, whether the schema says so or not."""
    for option in (plain or {}).get("anyOf", [plain]):
        if option is not None and option.get("type", "string") == "string":
            texts = [value for value in option.get("enum", ()) if isinstance(value, str)]
            if "enum" not in option or texts:
                return {**option, "enum": texts} if texts else dict(option)
    return None

"""The plain form of objects: named properties in their order, which of them are required, and what else may be there.

A schema that names properties and says nothing of others means these alone; `additionalProperties` says otherwise.
"""

from functools import partial

from bough.constrained import charsets
from bough.constrained.automata import TooLarge, matches, signatures
from bough.constrained.pattern_tree import Chars, Node, Repeat
from bough.constrained.schema_grammar import name_node
from bough.constrained.schema_source import join
from bough.constrained.type_forms import NO_KEYWORDS, Lowering, Part, Parts, Plain, pattern_for

MAX_CLASSES = 64  # of names, by the patterns that they match
MAX_COUNTED = 2_000  # rules that count properties


class ObjectForm:
    def __init__(self, lowering: Lowering, parts: Parts) -> None:
        self._lowering = lowering
        self._parts = parts
        self._said, self._gap_all = partial(lowering.said, parts), partial(lowering.gap_all, parts)
        self._required = list(
            dict.fromkeys(n for _, names in self._said("required") if isinstance(names, list) for n in names)
        )
        self._patterns: dict[str, Node] = {}  # those of patternProperties that can be enforced
        for pointer, patterns in self._said("patternProperties"):
            for pattern in patterns:
                tree = lowering.read_pattern(join(pointer, "patternProperties"), pattern, pattern)
                if tree is not None:
                    self._patterns[pattern] = tree
        named = (name for _, properties in self._said("properties") for name in properties)
        self._names = list(dict.fromkeys([*named, *self._required]))
        self._properties: dict[str, Plain] = {}
        self._closed = False

    def build(self) -> Plain | None:
        for property_name in self._names:
            allowed = all(
                self._lowering.accepts(join(pointer, "propertyNames"), property_name, "pattern")
                for pointer, _ in self._said("propertyNames")
            )
            value = self._lowering.lower(self._schemas_of(property_name)) if allowed else None
            if value is not None:
                self._properties[property_name] = value
            elif property_name in self._required:
                return None
        others = self._others()
        self._closed = not others
        plain: Plain = {"type": "object", "additionalProperties": False}
        if self._properties:
            plain |= {"properties": self._properties, "required": self._required}
        if others:
            plain["x-names"] = others
        if not self._counts(plain):
            return None
        self._note_gaps()
        return plain

    # ---- named properties

    def _schemas_of(self, name: str) -> list[Part]:
        return self._schemas([pattern for pattern in self._patterns if self._matches(pattern, name)], name)

    def _schemas(self, matched: list[str], name: str | None = None) -> list[Part]:
        """What is said about a property whose name matches just these patterns: in each part by its name and patterns,
        or else by what holds for all others."""
        found = []
        for pointer, _ in self._parts:
            node = self._lowering.node((pointer, NO_KEYWORDS))
            named = name is not None and name in node.get("properties", {})
            mine = [join(pointer, "properties", str(name))] if named else []
            mine += [join(pointer, "patternProperties", p) for p in node.get("patternProperties", {}) if p in matched]
            if not mine and "additionalProperties" in node:
                mine = [join(pointer, "additionalProperties")]
            found += [(path, NO_KEYWORDS) for path in mine]
        return found

    def _matches(self, pattern: str, name: str) -> bool:
        try:
            return matches(self._patterns[pattern], name)
        except TooLarge:
            self._gap_all("patternProperties", "is too much to decide for a name this long")
            return False

    # ---- other properties

    def _others(self) -> list[Plain]:
        """Classes of further names, none of them in two, with the form of their values."""
        said_more = self._said("additionalProperties") or self._patterns
        if self._names and not said_more:
            return []
        described = self._described_names() if self._said("propertyNames") else []
        if described is None:
            return []
        try:
            classes = self._classes(described)
        except TooLarge:
            self._gap_all("patternProperties", "is too much to tell all names apart; others are left out")
            return []
        return [entry for entry in classes if entry["value"] is not None]

    def _classes(self, described: list[str]) -> list[Plain]:
        """Names by the patterns that they match: a class for every set of patterns that some name matches."""
        patterns = list(self._patterns)
        base = name_node({"all": described, "none": [], "but": self._names})
        sets = signatures(base.pattern, list(self._patterns.values())) if patterns else {frozenset[int]()}
        if len(sets) > MAX_CLASSES:
            raise TooLarge
        written = [pattern_for(tree) for tree in self._patterns.values()]
        classes: list[Plain] = []
        for matched in sorted(sets, key=sorted):
            beside = frozenset().union(*(other for other in sets if matched < other)) - matched
            all_of = [*described, *(written[at] for at in sorted(matched))]
            none_of = [written[at] for at in sorted(beside)]  # what these names might match as well
            value = self._lowering.lower(self._schemas([patterns[at] for at in matched]))
            classes.append({"all": all_of, "none": none_of, "but": self._names, "value": value})
        return classes

    def _described_names(self) -> list[str] | None:
        """The patterns of `propertyNames`; None where there are no other names, or where they were listed."""
        paths = [(join(pointer, "propertyNames"), NO_KEYWORDS) for pointer, _ in self._said("propertyNames")]
        names = _strings_of(self._lowering.lower(paths))
        if names is None:
            return None
        if "enum" in names:
            for name in names["enum"]:
                value = None if name in self._names else self._lowering.lower(self._schemas_of(name))
                if value is not None:
                    self._properties[name] = value
            return None
        patterns = [names["pattern"]] if "pattern" in names else [part["pattern"] for part in names.get("allOf", ())]
        if "minLength" in names or "maxLength" in names:
            counted = Repeat(Chars(charsets.ALL), names.get("minLength", 0), names.get("maxLength"))
            patterns.append(pattern_for(counted))
        return patterns

    # ---- counts and what is left

    def _counts(self, plain: Plain) -> bool:
        """Writes minProperties and maxProperties where they are not implied; False where they cannot hold."""
        least, most = self._lowering.least_and_most(self._parts, "minProperties", "maxProperties")
        if most is not None and (most < len(self._required) or most < least):
            return False
        if self._closed and least > len(self._properties):
            return False
        if most is not None and self._closed and most >= len(self._properties):
            most = None
        if least > len(self._required) + 1 and not self._closed:
            # Others may be written twice under one name, which counts once: only one of them is sure to count.
            self._gap_all("minProperties")
            least = 0
        counted = least > len(self._required) or most is not None
        if counted and len(self._properties) * max(least, most or 0) > MAX_COUNTED:
            self._gap_all("minProperties")
            self._gap_all("maxProperties")
            return True
        if least > len(self._required):
            plain["minProperties"] = least
        if most is not None:
            plain["maxProperties"] = most
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


def _strings_of(plain: Plain | None) -> Plain | None:
    """What a schema says of strings: a property's name is one, whether the schema says so or not."""
    for option in (plain or {}).get("anyOf", [plain]):
        if option is not None and option.get("type", "string") == "string":
            texts = [value for value in option.get("enum", ()) if isinstance(value, str)]
            if "enum" not in option or texts:
                return {**option, "enum": texts} if texts else dict(option)
    return None

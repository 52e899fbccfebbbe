"""Any JSON schema in a few plain forms that back ends enforce; what does not fit is named by its path.

A place in the answer must satisfy several subschemas at once ("parts"): its own, those behind `$ref` and `allOf`, one
branch of each `anyOf`. Lowering writes one plain schema for such a set: an `anyOf`, an `enum`, or one type. A set that
meets itself becomes a definition. Keywords that cannot be enforced become gaps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Any

from bough.constrained.limits import MAX_LOOKS, require_choices
from bough.constrained.object_form import ObjectForm
from bough.constrained.schema_judge import same
from bough.constrained.schema_source import NotInSchema, SchemaSource, join, problems, unknown
from bough.constrained.type_forms import FORMS, NO_KEYWORDS, Form, Gap, Lowering, Part, Parts, Plain, any_of, constant

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
APPLICATORS = frozenset({"$ref", "allOf", "$dynamicRef", "$recursiveRef"})
ANNOTATIONS = frozenset(
    {"$schema", "$id", "$anchor", "$defs", "definitions", "$comment", "title", "description", "default", "examples"}
)
EARLIER_FORMS = {"divisibleBy": "multipleOf", "disallow": "not", "extends": "allOf"}
LARGE = frozenset({"properties", "anyOf", "items", "prefixItems", "additionalProperties"})  # shared as a definition
CONTENT = frozenset({"contentEncoding", "contentMediaType", "contentSchema"})
ALL_FORMS: dict[str, Form] = {**FORMS, "object": lambda lowering, parts, _: ObjectForm(lowering, parts).build()}


def lower_schema(schema: Any, field: str) -> tuple[dict[str, Any], tuple[Gap, ...]]:
    source = SchemaSource(schema, field)
    try:
        for pointer, problem in problems(schema):
            raise source.error(pointer, f"is not valid JSON Schema: {problem}")
        plain, gaps = _SchemaLowering(source).run()
        gaps += tuple(Gap(path, "is no keyword of JSON Schema: it says nothing", True) for path in unknown(schema))
    except RecursionError:
        raise source.error("", "leads from reference to reference too deep to be followed") from None
    return plain, gaps


class _SchemaLowering(Lowering):
    def __init__(self, source: SchemaSource) -> None:
        super().__init__(source)
        self._done: dict[Parts, Plain | None] = {}
        self._running: set[Parts] = set()
        self._looks = 0
        self._names: dict[Parts, str] = {}
        self._definitions: dict[str, Plain] = {}

    def run(self) -> tuple[Plain, tuple[Gap, ...]]:
        plain = self.lower([("", NO_KEYWORDS)])
        if plain is None:
            raise self.source.error("", "allows no value at all")
        if self._definitions:
            plain = {**plain, "$defs": self._definitions}
        return plain, tuple(self._gaps.values())

    def lower(self, parts: Iterable[Part]) -> Plain | None:
        key = self._expand(parts)
        if key is None:
            return None
        self._looks += 1 + len(key)
        if self._looks > MAX_LOOKS:
            raise self.source.error("", "has too many combinations of subschemas; make it smaller")
        if key in self._done:
            return self._again(key)
        if key in self._running:
            return self._reference(key)
        self._running.add(key)
        plain = self._lower(key)
        self._running.discard(key)
        self._done[key] = plain
        if key in self._names and plain is not None:
            self._definitions[self._names[key]] = plain
            return {"$ref": f"#/$defs/{self._names[key]}"}
        return plain

    # ---- repeats and recursion

    def _again(self, key: Parts) -> Plain | None:
        plain = self._done[key]
        if plain is None or LARGE.isdisjoint(plain):
            return plain
        reference = self._reference(key)
        self._definitions.setdefault(self._names[key], plain)
        return reference

    def _reference(self, key: Parts) -> Plain:
        name = self._names.setdefault(key, f"n{len(self._names)}")
        return {"$ref": f"#/$defs/{name}"}

    # ---- one set of parts

    def _expand(self, parts: Iterable[Part]) -> Parts | None:
        """The parts with all that `$ref` and `allOf` add to them, in a fixed order; None for the schema `false`."""
        todo, seen = list(parts), dict[Part, None]()
        while todo:
            part = todo.pop(0)
            node, whole = self.source.at(part[0]), (part[0], part[1] | APPLICATORS)
            if node is False:
                return None
            if whole in seen or node is True:
                continue
            if not isinstance(node, dict):
                raise self.source.error(part[0], "is not a schema")
            seen[whole] = None
            if part == whole:  # what it adds is among the parts, perhaps with a branch chosen
                continue
            if isinstance(node.get("$ref"), str) and (target := self._target(node["$ref"], part[0])) is not None:
                todo.append((target, NO_KEYWORDS))
            todo += [(join(part[0], "allOf", index), NO_KEYWORDS) for index in range(len(node.get("allOf", ())))]
            for keyword in ("$dynamicRef", "$recursiveRef"):
                if keyword in node:
                    self.gap(part[0], keyword)
        silent = APPLICATORS | ANNOTATIONS
        return tuple(sorted((p for p in seen if self.node(p).keys() - silent - p[1]), key=lambda part: part[0]))

    def _target(self, reference: str, pointer: str) -> str | None:
        try:
            target = self.source.target(reference)
            self.source.at(target)
        except NotInSchema as error:
            self.gap(pointer, "$ref", str(error))
            return None
        return target

    def _lower(self, parts: Parts) -> Plain | None:
        self._note_earlier_drafts(parts)
        values = self._values(parts)
        if values is not None:
            simple = [value for value in values if not isinstance(value, dict | list)]
            nested = [constant(value) for value in values if isinstance(value, dict | list)]
            return any_of([*([{"enum": simple}] if simple else []), *nested])
        for part in parts:
            for keyword in ("anyOf", "oneOf"):
                if keyword in self.node(part) and keyword not in part[1]:
                    return self._branches(parts, part, keyword)
        return self._typed(parts)

    def _branches(self, parts: Parts, part: Part, keyword: str) -> Plain | None:
        pointer, skipped = part
        rest = [*(other for other in parts if other != part), (pointer, skipped | {keyword})]
        count = len(self.node(part)[keyword])
        found = (self.lower([*rest, (join(pointer, keyword, index), NO_KEYWORDS)]) for index in range(count))
        options = [option for option in found if option is not None]
        if keyword == "oneOf" and not _distinguishable(list(enumerate(options)), self._definitions, MAX_STEPS):
            self.gap(pointer, keyword, "is enforced as anyOf only: its branches may hold at the same time")
        return any_of(options)

    # ---- enums

    def _values(self, parts: Parts) -> list[Any] | None:
        """The values of the first enum or const among the parts that satisfy all of them."""
        for part in parts:
            node = self.node(part)
            if "const" in node or "enum" in node:
                values = [node["const"]] if "const" in node else list(node["enum"])
                require_choices(len(values), f"{self.source.field}#{join(part[0], 'enum')}")
                if len(parts) == 1 and node.keys() <= {"enum", "const", *ANNOTATIONS}:
                    return values
                return [value for value in values if all(self.accepts(other[0], value, "enum") for other in parts)]
        return None

    # ---- types

    def types(self, parts: Parts) -> tuple[str, ...]:
        allowed = list(TYPES)
        for part in parts:
            node = self.node(part)
            if "type" in node:
                named = [node["type"]] if isinstance(node["type"], str) else node["type"]
                wider = {*named, "integer"} if "number" in named else {*named}
                allowed = [name for name in allowed if name in wider]
            if refused := _negated_types(node):
                allowed = [name for name in allowed if name not in refused]
        return tuple(name for name in allowed if name != "integer" or "number" not in allowed)

    def _typed(self, parts: Parts) -> Plain | None:
        if not parts:
            return {}
        if any(self.node(part).get("not") in (True, {}) for part in parts if "not" in self.node(part)):
            return None
        self._note_conditions(parts)
        options = [ALL_FORMS[name](self, parts, name) for name in self.types(parts)]
        return any_of([option for option in options if option is not None])

    def _note_earlier_drafts(self, parts: Parts) -> None:
        """What draft 3 had and later ones write in another way."""
        for part in parts:
            node = self.node(part)
            for keyword in EARLIER_FORMS.keys() & node.keys():
                self.gap(part[0], keyword, f"cannot be enforced: JSON Schema has {EARLIER_FORMS[keyword]} instead")
            if node.get("required") is True:
                self.gap(part[0], "required", "cannot be enforced: the object that has this property must name it")

    def _note_conditions(self, parts: Parts) -> None:
        for part in parts:
            node = self.node(part)
            for keyword in CONTENT & node.keys() if "string" in self.types(parts) else ():
                self.gap(part[0], keyword)
            if "not" in node and node["not"] is not False and not _negated_types(node):
                self.gap(part[0], "not")
            if "if" in node and ("then" in node or "else" in node):
                self.gap(part[0], "if")


def _negated_types(node: Plain) -> set[str]:
    """The types that a `not` rules out, where it does no more than that; numbers that are no integers are no type."""
    negated = node.get("not")
    if not isinstance(negated, dict) or negated.keys() != {"type"}:
        return set()
    named = {negated["type"]} if isinstance(negated["type"], str) else set(negated["type"])
    if "number" in named:
        return {*named, "integer"}
    return set() if "integer" in named else named


# ---- whether plain schemas exclude each other: `oneOf` is `anyOf` where they do
#
# They do when their types differ, when their values do, or when all ask for a property on which they exclude each
# other, which is how people write tagged unions. Anything else counts as not known. All are looked at together:
# comparing each with each would take hours for the thousands that a client may send.

MAX_STEPS = 8
MAX_COMPARED = 48  # objects that are compared each with each, where no property tells all of them apart
MAX_LEAVES = 20_000
KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
Owned = tuple[int, dict[str, Any]]  # a schema, and the option that it belongs to


def _distinguishable(schemas: list[Owned], definitions: Mapping[str, dict[str, Any]], steps: int) -> bool:
    if steps == 0:
        return False
    owner_of_value: dict[Any, int] = {}
    owners_of_kind: dict[str, set[int]] = {}  # of schemas that give a type
    value_kinds: dict[str, set[int]] = {}  # of schemas that give values
    objects: list[Owned] = []
    leaves = list(islice(_leaves(schemas, definitions, steps), MAX_LEAVES))
    if len(leaves) == MAX_LEAVES:
        return False
    for owner, schema in leaves:
        if "enum" in schema:
            for value in schema["enum"]:
                if owner_of_value.setdefault(same(value), owner) != owner:
                    return False
                value_kinds.setdefault(KINDS.get(type(value), "object"), set()).add(owner)
        elif "type" not in schema:
            return len({one for one, _ in schemas}) == 1
        else:
            kind = "number" if schema["type"] == "integer" else schema["type"]
            owners_of_kind.setdefault(kind, set()).add(owner)
            if kind == "object":
                objects.append((owner, schema))
    for kind, owners in owners_of_kind.items():
        everyone = owners | value_kinds.get(kind, set())
        if len(everyone) > 1 and (kind != "object" or value_kinds.get(kind)):
            return False
    return _disjoint_objects(objects, definitions, steps)


def _leaves(schemas: Sequence[Owned], definitions: Mapping[str, dict[str, Any]], steps: int) -> Iterator[Owned]:
    """The schemas with references and alternatives followed, each to a small depth."""
    for owner, schema in schemas:
        if "$ref" in schema:
            target = definitions.get(schema["$ref"].rpartition("/")[2])
            inner = [(owner, {} if target is None or steps == 0 else target)]
            yield from _leaves(inner, definitions, steps - 1) if inner[0][1] else inner
        elif "anyOf" in schema:
            options = [(owner, option) for option in schema["anyOf"]]
            yield from _leaves(options, definitions, steps - 1) if steps else [(owner, {})]
        else:
            yield owner, schema


def _disjoint_objects(objects: list[Owned], definitions: Mapping[str, dict[str, Any]], steps: int) -> bool:
    """Whether objects of different owners exclude each other: by one property for all, or each by one with each."""
    if len({owner for owner, _ in objects}) < 2:
        return True
    shared = set.intersection(*({*schema.get("required", ())} for _, schema in objects))
    for name in sorted(shared):
        values = [(owner, schema["properties"][name]) for owner, schema in objects if name in schema["properties"]]
        if len(values) == len(objects) and _distinguishable(values, definitions, steps - 1):
            return True
    if len(objects) == 2 or len(objects) > MAX_COMPARED:
        return False
    pairs = ([one, other] for one, other in combinations(objects, 2) if one[0] != other[0])
    return all(_disjoint_objects(pair, definitions, steps - 1) for pair in pairs)

"""The plain form of every type but objects: what several subschemas together say, in the type's own keywords.

Each function takes the parts that hold at one place (`schema_lowering`) and gives a schema with a single `type`, or
None where no value of that type satisfies them all.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from bough.constrained.automata import TooLarge
from bough.constrained.limits import MAX_ITEMS, MAX_POSITIONS
from bough.constrained.pattern_tree import Node, pattern_text, positions
from bough.constrained.regexes import PatternError, parse_regex
from bough.constrained.schema_grammar import has_text, number_node, string_node
from bough.constrained.schema_judge import Judge, Undecided
from bough.constrained.schema_source import SchemaSource, join
from bough.core.files import table_beside

Plain = dict[str, Any]
Part = tuple[str, frozenset[str]]  # where a subschema stands, and the keywords of it that are dealt with elsewhere
Parts = tuple[Part, ...]
NO_KEYWORDS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Gap:
    path: str
    reason: str
    says_nothing: bool = False  # nobody else would enforce it either


class Lowering(ABC):
    """What the forms of types ask of the walk over a schema (`schema_lowering`)."""

    def __init__(self, source: SchemaSource) -> None:
        self.source = source
        self._gaps: dict[str, Gap] = {}

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self.source.root)

    @abstractmethod
    def lower(self, parts: Iterable[Part]) -> Plain | None:
        """What satisfies all the parts; None where nothing does."""

    def node(self, part: Part) -> dict[str, Any]:
        found: dict[str, Any] = self.source.at(part[0])
        return found

    def said(self, parts: Parts, keyword: str) -> list[tuple[str, Any]]:
        """Where a keyword stands among the parts, and its value."""
        return [(part[0], node[keyword]) for part in parts if keyword in (node := self.node(part))]

    def gap(self, pointer: str, keyword: str, reason: str = "cannot be enforced") -> None:
        """Records a keyword that is not enforced."""
        path = join(pointer, keyword)
        self._gaps.setdefault(path, Gap(path, reason))

    def gap_all(self, parts: Parts, keyword: str, reason: str = "cannot be enforced") -> None:
        for pointer, _ in self.said(parts, keyword):
            self.gap(pointer, keyword, reason)

    def accepts(self, pointer: str, value: Any, keyword: str) -> bool:
        """Whether a value is valid; one that cannot be judged passes, and leaves a gap at the keyword."""
        try:
            return self._judge.accepts(self.source.at(pointer), value)
        except Undecided as error:
            self.gap(pointer, keyword, f"cannot be enforced: the schema {error}")
            return True

    def read_pattern(self, pointer: str, keyword: str, pattern: str) -> Node | None:
        """The tree of a client's pattern, which matches any part of a text; a gap where it cannot be enforced."""
        try:
            tree = parse_regex(pattern, search=True, field=self.source.field)
        except PatternError as error:
            self.gap(pointer, keyword, f"cannot be enforced: {error.reason}")
            return None
        if positions(tree) > MAX_POSITIONS:
            reason = f"cannot be enforced: its repeats written out, it has over {MAX_POSITIONS} parts"
            self.gap(pointer, keyword, reason)
            return None
        return tree

    def least_and_most(self, parts: Parts, least: str, most: str, limit: int = MAX_POSITIONS) -> tuple[int, int | None]:
        """The tightest of counts that several parts give; a gap where one is too large to be counted."""
        found: dict[str, list[int]] = {least: [], most: []}
        for keyword, values in found.items():
            for pointer, value in self.said(parts, keyword):
                if value > limit:
                    self.gap(pointer, keyword, f"cannot be enforced: nothing is counted beyond {limit} here")
                else:
                    values.append(int(value))
        return max(found[least], default=0), min(found[most], default=None)


def pattern_for(tree: Node) -> str:
    """A pattern in a plain schema: anchored, and in the one dialect."""
    return f"^(?:{pattern_text(tree)})$"


def constant(value: Any) -> Plain:
    """One value, its objects and arrays spelt out, so that they are spaced like all others."""
    if isinstance(value, dict):
        properties = {name: constant(inner) for name, inner in value.items()}
        return {
            "type": "object", "properties": properties, "required": list(value), "additionalProperties": False,
        }  # fmt: skip
    if isinstance(value, list):
        items = [constant(inner) for inner in value]
        return {
            "type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items),
        }  # fmt: skip
    return {"enum": [value]}


def any_of(options: list[Plain]) -> Plain | None:
    """One of the options, nested alternatives joined; None if there is none."""
    inners = [inner for option in options for inner in (option["anyOf"] if option.keys() == {"anyOf"} else [option])]
    flat = list({json.dumps(inner): inner for inner in inners}.values())
    if {} in flat:
        return {}
    if not flat:
        return None
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _formats() -> dict[str, str]:
    """Patterns of the formats that can be enforced."""
    table, known = table_beside(__file__, "formats.toml"), dict[str, str]()
    for name, pattern in (table["parts"] | table["formats"]).items():
        known[name] = re.sub("<(.+?)>", lambda part: known[part[1]], pattern)
    return {name: known[name] for name in table["formats"]}


FORMATS = _formats()
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Bound = tuple[int | float, bool]  # the value, and whether it is itself excluded


def number_form(lowering: Lowering, parts: Parts, name: str) -> Plain | None:
    low, high = _bound(lowering, parts, "inimum", max), _bound(lowering, parts, "aximum", min)
    step = _step(lowering, parts, name)
    if isinstance(step, int):
        name = "integer"  # its multiples are whole
    if name == "integer":
        low = None if low is None else (math.floor(low[0]) + 1 if low[1] else math.ceil(low[0]), False)
        high = None if high is None else (math.ceil(high[0]) - 1 if high[1] else math.floor(high[0]), False)
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    plain: Plain = {"type": name}
    if low is not None:
        plain["exclusiveMinimum" if low[1] else "minimum"] = low[0]
    if high is not None:
        plain["exclusiveMaximum" if high[1] else "maximum"] = high[0]
    if step is not None:
        plain["multipleOf"] = step
    return _writable(lowering, parts, plain)


def _writable(lowering: Lowering, parts: Parts, plain: Plain) -> Plain | None:
    """The form with what cannot be written taken out; None where it has no number."""
    try:
        if number_node(plain) is not None:
            return plain
    except TooLarge:
        lowering.gap_all(parts, "multipleOf", "cannot be enforced here: it is too much to count")
        return _writable(lowering, parts, {key: value for key, value in plain.items() if key != "multipleOf"})
    if "multipleOf" in plain:
        return None
    for keyword in BOUNDS:
        reason = "cannot be enforced: no number can be told from the bounds on both sides"
        lowering.gap_all(parts, keyword, reason)
    return {"type": plain["type"]}


def _bound(lowering: Lowering, parts: Parts, rest: str, tighter: Callable[..., Any]) -> Bound | None:
    """The tightest bound. Drafts up to 4 wrote `exclusiveMinimum: true` beside `minimum`."""
    plain, exclusive = ("m" + rest, "exclusiveM" + rest)
    found = []
    for part in parts:
        node = lowering.node(part)
        if plain in node:
            found.append((node[plain], node.get(exclusive) is True))
        if exclusive in node and not isinstance(node[exclusive], bool):
            found.append((node[exclusive], True))
    found = [(value, strict) for value, strict in found if abs(value) != math.inf]  # of any whole number
    if not found:
        return None
    value = tighter(value for value, _ in found)
    return value, any(strict for other, strict in found if other == value)


def _step(lowering: Lowering, parts: Parts, name: str) -> int | float | None:
    """The one `multipleOf` that says the same as all."""
    steps = [Fraction(str(step)) for _, step in lowering.said(parts, "multipleOf")]
    if not steps:
        return None
    if any(step.denominator & (step.denominator - 1) for step in steps):
        reason = "cannot be guaranteed: floats round such fractions, so that clients find other multiples"
        lowering.gap_all(parts, "multipleOf", reason)
    if name == "integer":
        steps.append(Fraction(1))
    numerator = math.lcm(*(step.numerator for step in steps))
    denominator = math.gcd(*(step.denominator for step in steps))
    return numerator if denominator == 1 else numerator / denominator


def string_form(lowering: Lowering, parts: Parts, name: str) -> Plain | None:
    least, most = lowering.least_and_most(parts, "minLength", "maxLength")
    if most is not None and least > most:
        return None
    lengths: Plain = {"minLength": least} if least else {}
    if most is not None:
        lengths["maxLength"] = most
    patterns = list(dict.fromkeys(pattern_for(tree) for tree in _patterns(lowering, parts)))
    plain = {"type": name, **lengths}
    if len(patterns) == 1:
        plain["pattern"] = patterns[0]
    elif patterns:
        plain["allOf"] = [{"pattern": pattern} for pattern in patterns]
    return plain if has_text(string_node(plain)) else None


def _patterns(lowering: Lowering, parts: Parts) -> list[Node]:
    found = []
    for pointer, pattern in lowering.said(parts, "pattern"):
        tree = lowering.read_pattern(pointer, "pattern", pattern)
        if tree is not None:
            found.append(tree)
    for pointer, named in lowering.said(parts, "format"):
        if named in FORMATS:
            found.append(parse_regex(FORMATS[named]))
        else:
            lowering.gap(pointer, "format", f"{named!r} cannot be enforced")
    return found


# ---- arrays: tuples are `prefixItems` and `items`; earlier drafts wrote a list in `items`, and `additionalItems`

Layout = tuple[list[Part], Part | None]  # the schemas of the first items, and of all that follow


def array_form(lowering: Lowering, parts: Parts, name: str) -> Plain | None:
    least, most = lowering.least_and_most(parts, "minItems", "maxItems", MAX_ITEMS)
    layouts = [_layout(lowering, part) for part in parts]
    prefix: list[Plain] = []
    rest: Plain | None = None
    for index in range(max(len(first) for first, _ in layouts)):
        said_here = (first[index] if index < len(first) else then for first, then in layouts)
        item = lowering.lower([part for part in said_here if part is not None])
        if item is None:
            break
        prefix.append(item)
    else:
        rest = lowering.lower([then for _, then in layouts if then is not None])
    if rest is None:
        most = len(prefix) if most is None else min(most, len(prefix))
    if most is not None:
        prefix = prefix[:most]
        if least > most:
            return None
    _note_gaps(lowering, parts, most)
    plain: Plain = {"type": name}
    if prefix:
        plain["prefixItems"] = prefix
    plain["items"] = False if rest is None or (prefix and most == len(prefix)) else rest
    if least:
        plain["minItems"] = least
    if most is not None:
        plain["maxItems"] = most
    return plain


def _layout(lowering: Lowering, part: Part) -> Layout:
    node, pointer = lowering.node(part), part[0]
    keyword, then = ("prefixItems", "items")
    if isinstance(node.get("items"), list):
        keyword, then = ("items", "additionalItems")
    first = [(join(pointer, keyword, index), NO_KEYWORDS) for index in range(len(node.get(keyword, ())))]
    return first, (join(pointer, then), NO_KEYWORDS) if then in node else None


def _note_gaps(lowering: Lowering, parts: Parts, most: int | None) -> None:
    for pointer, value in lowering.said(parts, "uniqueItems"):
        if value and (most is None or most > 1):
            lowering.gap(pointer, "uniqueItems")
    for part in parts:
        node = lowering.node(part)
        if "contains" in node and (node.get("minContains", 1) > 0 or "maxContains" in node):
            lowering.gap(part[0], "contains")
    for pointer, value in lowering.said(parts, "unevaluatedItems"):
        if value is not True and value != {}:
            lowering.gap(pointer, "unevaluatedItems")


Form = Callable[[Lowering, Parts, str], Plain | None]
FORMS: dict[str, Form] = {
    "array": array_form,
    "string": string_form,
    "number": number_form,
    "integer": number_form,
    "boolean": lambda lowering, parts, name: {"type": name},
    "null": lambda lowering, parts, name: {"type": name},
}

"""The plain form of null, booleans, numbers and strings: what several subschemas together say, in one type's own
keywords.

Each function takes the parts that hold at one place (`schema_lowering`) and gives a schema with a single `type`, or
None where no value of that type satisfies them all. Forms that the back end lacks become gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from bough.constrained.formats import FORMATS
from bough.constrained.limits import require_positions
from bough.constrained.pattern_tree import Node, length_bounds, positions
from bough.constrained.regexes import parse_regex
from bough.constrained.schema_parts import Parts, Plain, pattern_for, said
from bough.constrained.schema_source import join

if TYPE_CHECKING:
    from bough.constrained.schema_lowering import Lowering


MAX_STEP = 1024  # xgrammar counts no further, and llguidance takes minutes to
Bound = tuple[int | float, bool]  # the value, and whether it is itself excluded


def plain_form(lowering: Lowering, parts: Parts, name: str) -> Plain | None:
    """Null and boolean: nothing to say about them."""
    del lowering, parts
    return {"type": name}


# ---- numbers


def number_form(lowering: Lowering, parts: Parts, name: str) -> Plain | None:
    low, high = _bound(lowering, parts, "inimum", max), _bound(lowering, parts, "aximum", min)
    if name == "integer":
        low = None if low is None else (math.floor(low[0]) + 1 if low[1] else math.ceil(low[0]), False)
        high = None if high is None else (math.ceil(high[0]) - 1 if high[1] else math.floor(high[0]), False)
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    plain: Plain = {"type": name}
    if (low or high) and not lowering.features.number_ranges:
        _gap_bounds(lowering, parts)
        low = high = None
    if low is not None:
        plain["exclusiveMinimum" if low[1] else "minimum"] = low[0]
    if high is not None:
        plain["exclusiveMaximum" if high[1] else "maximum"] = high[0]
    steps = list(said(lowering, parts, "multipleOf"))
    step = _step(lowering, [step for _, step in steps], name)
    if step is not None:
        plain["multipleOf"] = step
    else:
        for pointer, _ in steps:
            lowering.gap(pointer, "multipleOf")
    return plain


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
    if not found:
        return None
    value = tighter(value for value, _ in found)
    return value, any(strict for other, strict in found if other == value)


def _gap_bounds(lowering: Lowering, parts: Parts) -> None:
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        for pointer, _ in said(lowering, parts, keyword):
            lowering.gap(pointer, keyword)


def _step(lowering: Lowering, steps: list[int | float], name: str) -> int | float | None:
    """The one `multipleOf` that says the same as all; None where there is none, or none that can be enforced."""
    if name == "number":
        enforced = lowering.features.fractional_multiples and len(steps) == 1 and _digits(steps[0]) <= MAX_STEP
        return steps[0] if enforced else None
    common = _common_step(steps)
    return common if steps and lowering.features.multiples and common <= MAX_STEP else None


def _digits(step: int | float) -> int:
    """What a fractional step is when the point is left out: the size of the automaton that counts with it."""
    return Fraction(str(step)).limit_denominator(10**9).numerator


def _common_step(steps: list[int | float]) -> int:
    """Integers that are multiples of all steps are multiples of this one."""
    common = 1
    for step in steps:
        numerator = Fraction(str(step)).numerator  # n * p/q is whole exactly for multiples of p, p/q in lowest terms
        common = common * numerator // math.gcd(common, numerator)
    return common


# ---- strings


def string_form(lowering: Lowering, parts: Parts, name: str) -> Plain | None:
    least = max((int(value) for _, value in said(lowering, parts, "minLength")), default=0)
    most = min((int(value) for _, value in said(lowering, parts, "maxLength")), default=None)
    if most is not None and least > most:
        return None
    patterns = list(_patterns(lowering, parts))
    plain: Plain = {"type": name}
    if patterns:
        plain |= _with_pattern(lowering, patterns)
        shortest, longest = length_bounds(patterns[0][1])
        if least <= shortest and (most is None or (longest is not None and longest <= most)):
            return plain
        if not lowering.features.length_beside_pattern:
            for keyword in ("minLength", "maxLength"):
                for pointer, _ in said(lowering, parts, keyword):
                    lowering.gap(pointer, keyword, "cannot be enforced beside pattern or format")
            return plain
    if least:
        plain["minLength"] = least
    if most is not None:
        plain["maxLength"] = most
        require_positions(most, f"{lowering.source.field} (maxLength)")
    return plain


def _patterns(lowering: Lowering, parts: Parts) -> Iterator[tuple[str, Node]]:
    """Where patterns and formats stand, with their trees."""
    for pointer, pattern in said(lowering, parts, "pattern"):
        path = join(pointer, "pattern")
        yield path, parse_regex(pattern, search=True, field=f"{lowering.source.field}#{path}")
    for pointer, named in said(lowering, parts, "format"):
        if named in FORMATS:
            yield join(pointer, "format"), parse_regex(FORMATS[named])
        else:
            lowering.gap(pointer, "format", f"{named!r} cannot be enforced")


def _with_pattern(lowering: Lowering, patterns: list[tuple[str, Node]]) -> Plain:
    for path, tree in patterns:
        require_positions(positions(tree), f"{lowering.source.field}#{path}")
    texts = list(dict.fromkeys(pattern_for(lowering, tree) for _, tree in patterns))
    if len(texts) == 1:
        return {"pattern": texts[0]}
    if lowering.features.several_patterns:
        return {"allOf": [{"pattern": text} for text in texts]}
    for path, _ in patterns[1:]:
        pointer, _, keyword = path.rpartition("/")
        lowering.gap(pointer, keyword, "cannot be enforced beside another pattern or format")
    return {"pattern": texts[0]}

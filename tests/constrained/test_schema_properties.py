"""Random schemas: whatever a random sampler writes under the masks is JSON, and `jsonschema` finds it valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.core.errors import RequestError
from tests.constrained.walks import matcher_of, random_text
from tests.fakes.grammar_specs import json_schema_spec

QUICK = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))

BOUNDS = st.one_of(
    st.integers(-(10**6), 10**6),
    st.sampled_from([0, 0.5, -0.25, 1.00000001, 1 / 3, 0.001, 1e-10, 2**53 + 1, -(2**63), 2**63, 10**30, 1e21]),
    st.floats(-1000, 1000, allow_nan=False).map(lambda value: round(value, 4)),
)
STEPS = st.sampled_from([1, 2, 3, 5, 7, 10, 12, 100, 1000, 0.5, 0.25, 2.5, 0.1, 0.01])
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], BOUNDS),
        "multipleOf": STEPS,
    },
)
NARROW = st.builds(
    lambda low, width, above, below: {
        "type": "number",
        "exclusiveMinimum" if above else "minimum": low,
        "exclusiveMaximum" if below else "maximum": low + width,
    },
    BOUNDS, st.sampled_from([0, 1e-8, 1e-3, 0.5, 1, 1000]), st.booleans(), st.booleans(),
)  # fmt: skip
PATTERNS = st.sampled_from(
    [
        "^[a-c]+$",
        "x",
        "^a",
        "b$",
        "^(a+)+$",
        "^([a-z]+ ?)*$",
        "[\\x00-\\x1f]",
        '"',
        "\\\\",
        "^(ab|a)(c|bcd)*$",
        "é",
        "^.{2,3}$",
        "^$",
    ]
)
STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 4),
        "maxLength": st.integers(0, 9),
        "pattern": PATTERNS,
        "format": st.sampled_from(["date", "ipv4", "email", "uuid", "time", "hostname"]),
    },
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=4), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([-(2**63), 2**53 + 1, 10**30, 0.1, 1e-320, "\x00\x7f\u2028", '"\\/']),
)  # fmt: skip
ENUMS = st.fixed_dictionaries(
    {
        "enum": st.lists(
            st.one_of(VALUES, st.dictionaries(st.text(max_size=2), VALUES, max_size=2)), min_size=1, max_size=4
        )
    },
    optional={"type": st.sampled_from(["string", "number", "integer", "object"]), "pattern": PATTERNS},
)
NAMES = st.sampled_from(["a", "ab", "b", "x_1", "", 'q"', "é", "a\tb", "long name"])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
            "propertyNames": STRINGS,
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(1, 3),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 3),
            "maxItems": st.integers(0, 4),
        },
    )
    joined = st.builds(
        lambda keyword, parts: {keyword: parts},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
    )
    return st.one_of(objects, arrays, joined)


SCALARS = st.one_of(NUMBERS, NARROW, STRINGS, ENUMS)
SCHEMAS = st.recursive(SCALARS, containers, max_leaves=5)


def judge(schema: Any, backend: str, seed: int) -> None:
    """Refused with its field and a path, or what comes out is valid."""
    try:
        matcher = matcher_of(json_schema_spec(schema), backend)
    except RequestError as error:
        assert error.field and "json_schema" in str(error), error
        return
    said = random_text(matcher, random.Random(seed), most=80)
    if said is not None:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(said))


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@QUICK
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_random_schemas(backend: str, schema: Any, seed: int) -> None:
    judge(schema, backend, seed)


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@QUICK
@given(schema=st.one_of(NUMBERS, NARROW), seed=st.integers(0, 1000))
def test_random_numbers(backend: str, schema: Any, seed: int) -> None:
    judge(schema, backend, seed)

"""Random schemas, patterns and grammars against a clock: each is compiled and can be walked, or is refused with a
sentence, within the time that a compile may take; and the compiler goes on. At every step of a walk the grammar is
asked for the text that must come."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bough.constrained.compiler import CachingCompiler
from bough.constrained.interface import GrammarSpec, Matcher
from bough.constrained.limits import MAX_FORCED
from bough.core.errors import RequestError
from tests.constrained.walks import BYTES, STOP, accepts, allowed_tokens
from tests.fakes.grammar_specs import choice_spec, ebnf_spec, json_schema_spec, regex_spec, structural_tag_spec

COUNTS = [pytest.param(40, marks=pytest.mark.slow), pytest.param(1500, marks=pytest.mark.long)]
TIMEOUT_S = 2.0  # of a compile
STEPS = 12  # of a walk
HANG_S = 120.0  # no bound on speed: with other work beside it, whatever takes longer does not end

WORDS = ["a", "b", "é", "😀", "\\", '"', "\n", "", "\x00", "$ref", "0" * 50, "^", "(?:", "x" * 300]
TYPES = ["string", "integer", "number", "boolean", "null", "object", "array", "any", "", 7, None, ["string", "null"]]
NUMBERS = [0, 1, -1, 2, 64, 10**6, 2**63, 10**400, 0.1, 1e308, -1e-300, None, "3"]
ATOMS = [
    "a",
    "[a-z]",
    "[^a]",
    "\\d",
    "\\w",
    ".",
    "\\p{L}",
    "\\x{41}",
    "[\\s\\S]",
    "\\b",
    "^",
    "$",
    "\\1",
    "[z-a]",
    "(?=a)",
    "é",
]


def schema(draw: random.Random, depth: int = 0) -> Any:
    """Keywords in any company, with values that often do not belong there."""
    if depth > 5 or draw.random() < 0.1:
        return draw.choice([True, False, {}, None, [], "x", 3, {"type": draw.choice(TYPES)}])
    found: dict[str, Any] = {}

    def below() -> Any:
        return schema(draw, depth + 1)

    for _ in range(draw.randrange(1, 5)):
        match draw.randrange(12):
            case 0:
                found["type"] = draw.choice(TYPES)
            case 1:
                found["properties"] = {draw.choice(WORDS): below() for _ in range(draw.randrange(4))}
            case 2:
                found[draw.choice(["allOf", "anyOf", "oneOf", "prefixItems"])] = [
                    below() for _ in range(draw.randrange(4))
                ]
            case 3:
                found[draw.choice(["items", "additionalProperties", "not", "if", "then", "contains"])] = below()
            case 4:
                found["$ref"] = draw.choice(
                    ["#", "#/$defs/a", "#/properties/a", "file:///etc/passwd", "http://127.0.0.1:9/"]
                )
            case 5:
                found["$defs"] = {"a": below(), "b": {"$ref": "#/$defs/a"}}
            case 6:
                found[draw.choice(["minimum", "maximum", "multipleOf", "exclusiveMinimum"])] = draw.choice(NUMBERS)
            case 7:
                found[draw.choice(["minLength", "maxLength", "minItems", "maxItems", "minProperties"])] = draw.choice(
                    NUMBERS
                )
            case 8:
                found["pattern"] = pattern(draw)
            case 9:
                found["enum"] = [draw.choice([*WORDS, *NUMBERS]) for _ in range(draw.randrange(5))]
            case 10:
                found["required"] = [draw.choice(WORDS) for _ in range(draw.randrange(3))]
            case _:
                found[draw.choice(["const", "format", "patternProperties", "unevaluatedProperties", "x"])] = below()
    return found


def pattern(draw: random.Random, depth: int = 0) -> str:
    if depth > 6 or draw.random() < 0.25:
        return draw.choice(ATOMS)
    inner = pattern(draw, depth + 1)
    match draw.randrange(7):
        case 0:
            return f"({inner})*"
        case 1:
            low = draw.choice([0, 1, 3, 50, 1000, 10**7, 10**30])
            return f"(?:{inner}){{{low},{draw.choice([low, low * 2 + 1, ''])}}}"
        case 2:
            return f"(?:{inner}|{pattern(draw, depth + 1)})+"
        case 3:
            return f"({inner}+)+"
        case 4:
            return inner + draw.choice(["(", ")", "[", "{", "\\", "**", "?+"])
        case _:
            return inner + pattern(draw, depth + 1)


def ebnf(draw: random.Random) -> str:
    names = ["root", "a", "b", "c"]
    parts = [
        '"x"',
        "[a-z]",
        "[^\\n]*",
        '"\\u00e9"',
        "a",
        "b",
        "c",
        "root",
        "(a | b)",
        "a*",
        "b?",
        '""',
        "'x'",
        "[",
        "d",
    ]
    rules = [
        f"{name} ::= " + draw.choice([" ", " | "]).join(draw.choice(parts) for _ in range(draw.randrange(1, 5)))
        for name in names[: draw.randrange(1, 5)]
    ]
    return "\n".join(rules) + draw.choice(["", "\n", "\x00", "\n::="])


def specs(count: int) -> Iterator[GrammarSpec]:
    draw = random.Random(23)
    for turn in range(count):
        try:
            match turn % 5:
                case 0 | 1:
                    yield json_schema_spec(schema(draw))
                case 2:
                    yield regex_spec(pattern(draw))
                case 3:
                    yield ebnf_spec(ebnf(draw))
                case _:
                    tag = {"begin": draw.choice(WORDS), "schema": schema(draw), "end": draw.choice(WORDS)}
                    given = {"structures": [tag], "triggers": [draw.choice(WORDS)]}
                    yield structural_tag_spec(draw.choice([given, json.dumps(given), {"format": schema(draw)}]))
        except RequestError as error:
            assert error.status_code == 400 and str(error).strip()


def walk(matcher: Matcher, draw: random.Random) -> int:
    """Goes some random steps; at how many of them text was forced. That is allowed, has no alternative, and asking for
    it changes nothing."""
    mask, again, forcing = np.zeros(BYTES.mask_words, np.int32), np.zeros(BYTES.mask_words, np.int32), 0
    for _ in range(STEPS):
        matcher.fill(mask)
        allowed = [int(token) for token in allowed_tokens(mask)]
        forced = matcher.forced()
        assert len(forced) <= 4 * MAX_FORCED  # bytes of a character
        if forced:
            forcing += 1
            assert not matcher.can_end
            pieces = [BYTES.pieces[token] for token in allowed]
            assert all(forced.startswith(piece) or piece.startswith(forced) for piece in pieces), (forced, pieces[:9])
            assert all(map(matcher.accept, forced)), forced
            matcher.rollback(len(forced))
            matcher.fill(again)
            assert (mask == again).all(), forced
        if matcher.finished or not allowed:
            break
        assert matcher.accept(draw.choice([token for token in allowed if token != STOP] or allowed))
    return forcing


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "outlines-core"])
def test_a_grammar_is_compiled_or_refused_in_time(backend: str, count: int) -> None:
    compiler = CachingCompiler(backend, lambda: BYTES, timeout_s=TIMEOUT_S)
    compiled = refused = forcing = 0
    draw = random.Random(29)
    try:
        for spec in specs(count):
            ticket, begin = compiler.request(spec), time.monotonic()
            while not ticket.done:
                assert time.monotonic() < begin + HANG_S, f"no end: {spec.kind} {spec.text[:2000]}"
                time.sleep(0.001)
            try:
                matcher = ticket.result().matcher()
            except RequestError as error:
                refused += 1
                assert error.status_code == 400 and str(error).strip(), f"{error}: {spec.kind} {spec.text[:2000]}"
                assert "please report it" not in str(error), f"{error}: {spec.kind} {spec.text[:2000]}"  # a defect
            else:
                compiled += 1
                accepts(matcher, '{"a": 1}')
                try:
                    forcing += walk(matcher, draw)
                except RequestError as error:  # a limit of the back end
                    assert str(error).strip()
                except AssertionError as error:
                    raise AssertionError(f"{spec.kind} {spec.text[:2000]}") from error
        assert compiled and refused and forcing
        ticket = compiler.request(choice_spec(["yes", "no"]))
        while not ticket.done:
            time.sleep(0.001)
        assert accepts(ticket.result().matcher(), "yes")
    finally:
        compiler.close()

"""The default model under real schemas at temperature 1: every answer validates, or it was refused with a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import jsonschema
import pytest

import bough
from bough.constrained.prepare import prepare
from bough.core.errors import RequestError
from tests.constrained.recogniser import recognises
from tests.constrained.suites import suite_groups, tool_schemas
from tests.fakes.grammar_specs import json_schema_spec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def engine(request: pytest.FixtureRequest) -> Iterator[bough.Engine]:
    with bough.Engine(grammar_backend=request.param, grammar_timeout_s=60) as running:
        yield running


@pytest.mark.parametrize("count", [12, pytest.param(160, marks=pytest.mark.long)])
def test_tools_of_a_leaderboard(engine: bough.Engine, count: int) -> None:
    schemas = list({json.dumps(schema): schema for schema in tool_schemas()}.values())
    if not schemas:
        pytest.skip("the schemas are not there: `make schemas` fetches them")
    chosen = schemas[:: len(schemas) // count][:count]
    prompts = [f"Arguments of a call, as JSON, {number}: " for number in range(len(chosen))]
    sampling = [{"json_schema": schema, "max_new_tokens": 200, "temperature": 1.0} for schema in chosen]
    whole = refused = 0
    for schema, output in zip(chosen, engine.generate(prompts, sampling), strict=True):
        reason = output["meta_info"]["finish_reason"]
        if reason["type"] == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(output["text"]))
            whole += 1
        elif reason["type"] == "abort":
            assert reason["message"]
            refused += 1
        else:
            assert reason["type"] == "length"
    assert whole > count / 2 and refused < count / 5, (whole, refused)


@pytest.mark.parametrize("step", [12, pytest.param(3, marks=pytest.mark.long)])
def test_the_official_suite(engine: bough.Engine, step: int) -> None:
    groups = [group for group in suite_groups() if "localhost" not in json.dumps(group.schema)]
    if not groups:
        pytest.skip("the schemas are not there: `make schemas` fetches them")
    chosen = [group.schema for group in groups[::step] if not refusal(group.schema)]
    sampling = [{"json_schema": schema, "max_new_tokens": 48, "temperature": 1.0} for schema in chosen]
    whole = 0
    for schema, output in zip(chosen, engine.generate(["A value: "] * len(chosen), sampling), strict=True):
        if output["meta_info"]["finish_reason"]["type"] == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(output["text"]))
            whole += 1
    assert whole > len(chosen) / 8, (whole, len(chosen))  # many of its schemas allow texts without end


PATTERNS = (
    r"(\w+\s?)*\.",
    r"([ -~]+ ?){1,20}",
    r"(.{1,10}){1,10}",
    r"[A-Z][a-z]+( [a-z]+){2,6}\.",
    r"\d{4}-\d{2}-\d{2}",
    r"(yes|no|maybe), (because|since) [a-z ]+\.",
)
GRAMMAR = """
root   ::= "It is " phrase "."
phrase ::= "good" | "bad" | "very " phrase | "not " phrase | "(" phrase ")"
"""


def test_patterns_that_can_be_read_in_many_ways_and_in_one(engine: bough.Engine) -> None:
    asked = [pattern for pattern in PATTERNS for _ in range(8)]
    sampling = [{"regex": pattern, "max_new_tokens": 60, "temperature": 1.0} for pattern in asked]
    whole = 0
    for pattern, output in zip(asked, engine.generate(["In short: "] * len(asked), sampling), strict=True):
        reason = output["meta_info"]["finish_reason"]["type"]
        assert reason in ("stop", "length"), output["meta_info"]
        if reason == "stop":
            assert re.fullmatch(pattern, output["text"], re.ASCII), (pattern, output["text"])
            whole += 1
    assert whole > len(asked) / 4, whole


def test_a_recursive_grammar(engine: bough.Engine) -> None:
    sampling = {"ebnf": GRAMMAR, "max_new_tokens": 60, "temperature": 1.0}
    outputs = engine.generate(["How is it? "] * 16, sampling)
    whole = [o["text"] for o in outputs if o["meta_info"]["finish_reason"]["type"] == "stop"]
    assert whole and all(recognises(GRAMMAR, text) for text in whole), whole


def refusal(schema: object) -> str:
    """Why a schema is refused by some back end; nothing if none refuses it."""
    for backend in ("xgrammar", "llguidance"):
        try:
            prepare(json_schema_spec(schema), backend)
        except RequestError as error:
            return str(error)
    return ""

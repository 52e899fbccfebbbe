"""References that lead out of a schema: none is followed, whatever its form, on no path and by no back end."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bough.constrained.prepare import prepare
from bough.constrained.schema_lowering import lower_schema
from bough.core.errors import RequestError
from tests.constrained.walks import BACKEND_NAMES, matcher_of
from tests.fakes.bait import SECRET, Bait, laid_out
from tests.fakes.grammar_specs import json_schema_spec, structural_tag_spec


@pytest.fixture(scope="module")
def bait(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bait]:
    with laid_out(tmp_path_factory.mktemp("bait")) as made:
        yield made


NAMES = list(Bait("http://localhost", "file:///bait.json").schemas())


def test_the_bait_notices_who_takes_it(tmp_path: Path) -> None:
    with laid_out(tmp_path) as own:
        for address in (own.url, own.file):
            with urllib.request.urlopen(address) as answer:
                assert json.load(answer) == {"const": SECRET}
        assert own.fetched == ["/"]
        assert {"urllib.Request", "socket.connect", "open"} <= {event.split()[0] for event in own.touched}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_fetched(bait: Bait, name: str, backend: str, strict: bool) -> None:
    """A strict schema is refused with the place that is to blame; of another one the rest holds, and it is told."""
    schema = bait.schemas()[name]
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    for spec in (json_schema_spec(schema, strict=strict), structural_tag_spec(tag, strict=strict)):
        if strict:
            with pytest.raises(RequestError, match=f"{spec.kind}#.*(not in the schema|out of the schema|Ref cannot)"):
                prepare(spec, backend)
        else:
            assert prepare(spec, backend).warnings
            assert matcher_of(spec, backend)
    assert bait.fetched == [] and bait.touched == []


@pytest.mark.parametrize(
    "address", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
)
def test_meta_schemas_are_known_without_a_network(bait: Bait, address: str) -> None:
    """They come with the validator, which judges enums; elsewhere they are refused like any other reference."""
    judged = {"enum": ["no schema", 5, True], "$ref": address}
    assert prepare(json_schema_spec({"$schema": address, "type": "integer"}), "xgrammar").warnings == ()
    assert lower_schema(judged, "json_schema")[0] == {"enum": [True]}
    with pytest.raises(RequestError, match="nothing is fetched; put what it names under"):
        prepare(json_schema_spec({"$ref": address}), "xgrammar")
    assert bait.touched == []


def test_back_ends_fetch_nothing_even_when_asked(bait: Bait) -> None:
    """They are only given what is lowered; should that ever change, they still have no way out."""
    import llguidance
    import outlines_core
    import xgrammar

    for address in (f"{bait.url}/a", bait.file):
        schema = json.dumps({"$ref": address})
        for grammar in (
            llguidance.LLMatcher.grammar_from_json_schema(schema),
            llguidance.LLMatcher.grammar_from_lark(f"start: %json {schema}"),
        ):
            assert llguidance.LLMatcher.validate_grammar(grammar)
        assert SECRET not in str(xgrammar.Grammar.from_json_schema(schema))
        with pytest.raises(Exception, match="reference"):
            outlines_core.json_schema.build_regex_from_schema(schema)
    assert bait.fetched == []


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$id": "http://[", "type": "string"}, "json_schema#/$id is not an address"),
        ({"$defs": {"d": {"$id": "http://["}}, "type": "string"}, "json_schema#/$defs/d/$id is not an address"),
        ({"$id": 7, "$defs": {"d": {"$id": "x"}}}, "json_schema#/$id is not valid JSON Schema: 7 is not a string"),
        ({"$id": "http://a", "$ref": "http://["}, "'http://[', which is not in the schema"),
        ({"enum": ["x"], "not": {"$ref": "http://["}}, "out of the schema (http://[)"),
        ({"enum": ["x"], "not": {"$ref": "#anchor"}}, "out of the schema (anchor)"),
        ({"enum": ["x"], "not": {"$ref": "#/enum/0"}}, "to what is not a schema ('x')"),
    ],
)
def test_references_that_cannot_be_read_are_told(schema: Any, said: str, strict: bool) -> None:
    try:
        told = str(prepare(json_schema_spec(schema, strict=strict), "xgrammar").warnings)
        assert not strict
    except RequestError as error:
        told = str(error)
    assert said in told.replace('\\"', '"').replace("\\'", "'")

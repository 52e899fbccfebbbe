"""What an answer must match, in each protocol's words."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from bough.constrained.prepare import ADVICE
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.server.grammars import GrammarFields, format_fields, grammar_names, grammar_of, ollama_format
from bough.server.protocols import all_endpoints
from tests.server.protocol_desk import Desk, at_desk

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


def fields(**given: Any) -> GrammarFields:
    return msgspec.convert(given, GrammarFields)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json_schema": SCHEMA, "grammar_strict": False},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            {"json_schema": SCHEMA, "grammar_strict": True},
        ),
        ({"response_format": TAG}, {"structural_tag": TAG, "grammar_strict": False}),
        ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
        ({"structural_tag": json.dumps(TAG)}, {"structural_tag": json.dumps(TAG)}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": json.dumps(SCHEMA)}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choices": ["a", "b"]}),
        ({"guided_grammar": "root ::= 'a'", "guided_decoding_backend": "xgrammar"}, {"ebnf": "root ::= 'a'"}),
        ({"guided_json_object": True}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"choice": ["x"], "disable_fallback": True}}, {"choices": ["x"]}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json_object": False}}, {}),
        ({"guided_choice": []}, {"choices": []}),  # which the engine refuses
        (
            {"response_format": {"type": "json_schema", "strict": True, "json_schema": {"schema": SCHEMA}}},
            {"json_schema": SCHEMA, "grammar_strict": True},
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "strict": True,
                    "json_schema": {"schema": SCHEMA, "strict": False},
                }
            },
            {"json_schema": SCHEMA, "grammar_strict": False},
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"json_schema": SCHEMA, "grammar_strict": False},
        ),
        (
            {"response_format": {"type": "structural_tag", "structural_tag": TAG, "strict": True}},
            {"structural_tag": TAG, "grammar_strict": True},
        ),
    ],
)
def test_what_a_request_means(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert grammar_of(fields(**given)) == meant


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": 1}}},
            "response_format",
        ),
        ({"json_schema": SCHEMA, "guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_meant(given: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(fields(**given))
    assert caught.value.field == field


def test_two_of_vllms_fields_are_named_as_the_client_named_them() -> None:
    with pytest.raises(RequestError, match="guided_regex and guided_choice each say"):
        grammar_of(fields(guided_choice=["a"], guided_regex="b"))


def test_errors_are_in_the_clients_words() -> None:
    assert grammar_names(fields(guided_json=SCHEMA)) == {"json_schema": "guided_json"}
    assert grammar_names(fields(regex="a")) == {}


def test_ollamas_formats() -> None:
    assert ollama_format(None) == ollama_format("") == {}
    assert ollama_format("json") == {"json_schema": {"type": "object"}}
    for given in (SCHEMA, TEXT):
        assert ollama_format(given) == {"json_schema": SCHEMA, "grammar_strict": False}
    for wrong in ("yaml", "[1]"):
        with pytest.raises(RequestError, match="format"):
            ollama_format(wrong)
    assert format_fields({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, "text.format") == {
        "json_schema": SCHEMA,
        "grammar_strict": True,
    }


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ANTHROPIC = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "body", "strict"),
    [
        ("/generate", {"text": "a", "sampling_params": {"json_schema": SCHEMA}}, True),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": TEXT}}, True),
        ("/v1/completions", {"prompt": "a", "guided_json": SCHEMA}, True),
        ("/v1/completions", {"prompt": "a", "json_schema": TEXT}, True),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            False,
        ),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
            True,
        ),
        ("/api/chat", {**CHAT, "format": SCHEMA, "stream": False}, False),
        ("/api/generate", {"prompt": "a", "format": SCHEMA, "stream": False}, False),
        ("/api/generate", {"prompt": "a", "format": TEXT, "stream": False}, False),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "output_config": {"format": ANTHROPIC}}, True),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "output_format": ANTHROPIC}, True),
    ],
)
def test_every_protocol_brings_its_schema_to_the_engine(path: str, body: dict[str, Any], strict: bool) -> None:
    async def use(desk: Desk) -> None:
        await desk.post(path, **body)
        sampling = desk.asked.sampling
        assert json.loads(sampling.json_schema or "") == SCHEMA and sampling.grammar_strict is strict

    at_desk(all_endpoints, use)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_refused_is_a_400_that_names_the_clients_field(stream: bool) -> None:
    async def use(desk: Desk) -> None:
        answer = await desk.post("/v1/chat/completions", 400, **CHAT, guided_json=SCHEMA, stream=stream)
        assert answer["error"]["param"] == "guided_json"
        assert answer["error"]["message"].startswith("guided_json#/not")

    refusal = FinishAbort("json_schema#/not cannot be enforced.", 400, "BadRequestError", "json_schema")
    at_desk(all_endpoints, use, lambda request: refusal)


STRICT = {"type": "json_schema", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": {"json_schema": SCHEMA}}),
        ("/v1/completions", {"prompt": "a", "guided_json": SCHEMA}),
        ("/v1/chat/completions", {**CHAT, "response_format": STRICT}),
        ("/v1/responses", {"input": "a", "text": {"format": STRICT}}),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "output_config": {"format": ANTHROPIC}}),
    ],
)
def test_the_advice_to_be_less_strict_reads_alike_on_every_route(path: str, body: dict[str, Any]) -> None:
    async def use(desk: Desk) -> None:
        assert json.dumps(ADVICE)[1:-1] in json.dumps(await desk.post(path, 400, **body))

    at_desk(all_endpoints, use, lambda request: FinishAbort(ADVICE, 400, "BadRequestError", "json_schema"))


def test_a_native_request_may_be_less_strict() -> None:
    async def use(desk: Desk) -> None:
        await desk.post("/generate", text="a", sampling_params={"json_schema": SCHEMA, "grammar_strict": False})
        assert desk.asked.sampling.grammar_strict is False

    at_desk(all_endpoints, use)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "guided_choice": []}, "guided_choice"),
        ("/v1/completions", {"prompt": "a", "guided_json": ""}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "schema": ""}}}, "text.format"),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "structural_tag", "structural_tag": ""}},
            "response_format",
        ),
    ],
)
def test_an_empty_grammar_is_not_ignored(path: str, body: dict[str, Any], field: str) -> None:
    async def use(desk: Desk) -> None:
        error = (await desk.post(path, 400, **body))["error"]
        assert re.match(rf"{field} (is empty|of type \w+ needs a )", error["message"]) and error["param"] == field

    at_desk(all_endpoints, use)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_sglangs_own_fields_ask_for_nothing_where_they_are_empty(path: str) -> None:
    prompt = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}[path]

    async def use(desk: Desk) -> None:
        await desk.post(path, **prompt, json_schema="", regex="", ebnf="", structural_tag="")
        assert not desk.asked.sampling.constrained
        await desk.post(path, **prompt, json_schema="", regex="a+")
        assert desk.asked.sampling.regex == "a+" and desk.asked.sampling.json_schema is None

    at_desk(all_endpoints, use)


def test_a_response_names_the_clients_fields_in_a_conflict() -> None:
    async def use(desk: Desk) -> None:
        body = {"input": "a", "guided_regex": "a", "text": {"format": {"type": "json_object"}}}
        error = (await desk.post("/v1/responses", 400, **body))["error"]
        assert error["message"].startswith("text.format and guided_regex each say")

    at_desk(all_endpoints, use)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format",
        ),
        ("/v1/completions", {"prompt": "a", "guided_json": SCHEMA}, "guided_json"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format"),
        ("/api/chat", {**CHAT, "format": SCHEMA, "stream": False}, "format"),
    ],
)
def test_warnings_name_the_clients_field(path: str, body: dict[str, Any], field: str) -> None:
    async def use(desk: Desk) -> None:
        desk.engine.warnings = ("json_schema#/not cannot be enforced (grammar back end xgrammar)",)
        told = [f"{field}#/not cannot be enforced (grammar back end xgrammar)"]
        assert (await desk.post(path, **body))["warnings"] == told
        if path.startswith("/v1"):
            events = await desk.stream(path, **body)
            last = [e.get("response", e) for e in events if isinstance(e, dict) and "warnings" in e.get("response", e)]
            assert [each["warnings"] for each in last] == [told]

    at_desk(all_endpoints, use)


def test_what_is_not_enforced_is_said_at_the_top_level() -> None:
    """And in the native API in `meta_info`, in a stream with the last chunk."""

    async def use(desk: Desk) -> None:
        desk.engine.warnings = ("json_schema#/not is not enforced.",)
        told = list(desk.engine.warnings)
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/responses", {"input": "a"}),
            ("/api/chat", {**CHAT, "stream": False}),
        ):
            shown = (await desk.post(path, **body))["warnings"]
            assert shown == (["format#/not is not enforced."] if path == "/api/chat" else told)
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})):
            *_, last, done = await desk.stream(path, **body)
            assert done == "[DONE]" and last["warnings"] == told
        assert (await desk.post("/generate", text="a"))["meta_info"]["warnings"] == told
        desk.engine.warnings = ()
        assert "warnings" not in await desk.post("/v1/chat/completions", **CHAT)

    at_desk(all_endpoints, use)

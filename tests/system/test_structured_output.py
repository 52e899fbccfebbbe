"""Structured output as its users meet it: the `openai` SDK, the native and Ollama's API, on the default model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import pydantic
import pytest

from bough.sampling.custom_logit_processor import CustomLogitProcessor
from tests.system.serving import running

openai = pytest.importorskip("openai", reason="the openai SDK is not installed (pip install bough[dev])")

ASK: list[Any] = [{"role": "user", "content": "Describe a city as JSON."}]
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "continent": {"enum": ["Africa", "Asia", "Europe"]},
    },
    "required": ["name", "inhabitants", "continent"],
    "additionalProperties": False,
}


KEY = "for-code-too"
CODE = ("--enable-custom-logit-processor", "--api-key", KEY)
HEADERS = {"authorization": f"Bearer {KEY}"}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    continent: Literal["Africa", "Asia", "Europe"]
    capital: bool


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running("--max-total-tokens", "20000", "--grammar-timeout-s", "5", *CODE) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def native(address: str, status: int = 200, *, text: str = "A city: ", **sampling: Any) -> Any:
    params = {"max_new_tokens": 80, **sampling}
    body = {"text": text, "sampling_params": params, "return_logprob": True}
    answer = httpx.post(f"{address}/generate", headers=HEADERS, json=body, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_schema_as_response_format_whole_and_streamed(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    whole = client.chat.completions.create(model="m", messages=ASK, response_format=form, seed=1, n=2, max_tokens=80)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), CITY)
    stream = client.chat.completions.create(
        model="m", messages=ASK, response_format=form, seed=1, max_tokens=80, stream=True, temperature=0
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    jsonschema.validate(json.loads(text), CITY)


def test_a_model_of_pydantic_is_parsed(client: Any) -> None:
    answer = client.chat.completions.parse(model="m", messages=ASK, response_format=City, max_tokens=80)
    city = answer.choices[0].message.parsed
    assert isinstance(city, City) and city.continent in ("Africa", "Asia", "Europe")


def test_the_responses_api_and_vllms_spellings(client: Any) -> None:
    made = client.responses.parse(model="m", input="Describe a city.", text_format=City, max_output_tokens=80)
    assert isinstance(made.output_parsed, City)
    chosen = client.completions.create(model="m", prompt="Is it? ", extra_body={"guided_choice": ["yes", "no"]})
    assert chosen.choices[0].text in ("yes", "no") and chosen.choices[0].finish_reason == "stop"
    phone = client.completions.create(
        model="m", prompt="Call ", extra_body={"structured_outputs": {"regex": r"\d{3}-\d{4}"}}
    )
    assert re.fullmatch(r"\d{3}-\d{4}", phone.choices[0].text)


def test_any_object_and_ollamas_format(client: Any, address: str) -> None:
    form = {"type": "json_object"}
    answer = client.chat.completions.create(
        model="m", messages=ASK, response_format=form, max_tokens=200, temperature=0
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content.startswith("{")
    body = {"messages": ASK, "format": CITY, "stream": False, "options": {"num_predict": 80}}
    told = httpx.post(f"{address}/api/chat", headers=HEADERS, json=body, timeout=120).json()
    jsonschema.validate(json.loads(told["message"]["content"]), CITY)


def test_what_cannot_be_enforced_is_refused_or_told(client: Any) -> None:
    schema = {**CITY, "not": {"required": ["x"]}}
    inner = {"name": "city", "schema": schema}
    form = {"type": "json_schema", "json_schema": {**inner, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=ASK, response_format=form)
    assert refused.value.param == "response_format" and "not" in refused.value.message
    loose = {"type": "json_schema", "json_schema": inner}
    answer = client.chat.completions.create(model="m", messages=ASK, response_format=loose, max_tokens=80)
    assert any("not" in warning for warning in answer.warnings)
    jsonschema.validate(json.loads(answer.choices[0].message.content), CITY)


def test_a_cut_answer_says_length_and_logprobs_are_of_the_free_distribution(address: str) -> None:
    cut = native(address, json_schema=CITY, max_new_tokens=4)
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    free = native(address, text="A city: ", max_new_tokens=1, temperature=0)
    forced = native(address, regex="[{]x", temperature=0)
    (best, *_), (first, *_) = (o["meta_info"]["output_token_logprobs"][0] for o in (free, forced))
    assert forced["text"] == "{x" and first < best < 0
    assert len(forced["meta_info"]["output_token_logprobs"]) == len(forced["output_ids"])


def test_a_custom_logit_processor(address: str) -> None:
    class OnlyToken(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            for line, params in zip(logits, custom_param_list, strict=True):
                line[:] = -1e9
                line[params["token"]] = 0.0
            return logits

    def ask(status: int, processor: str, **params: Any) -> Any:
        body = {"text": "a", "sampling_params": params, "custom_logit_processor": processor}
        answer = httpx.post(f"{address}/generate", headers=HEADERS, json=body, timeout=120)
        assert answer.status_code == status, answer.text
        return answer.json()

    told = ask(200, OnlyToken.to_str(), max_new_tokens=3, custom_params={"token": 300})
    assert told["output_ids"] == [300] * 3
    assert httpx.post(f"{address}/generate", json={"text": "a", "custom_logit_processor": "{}"}).status_code == 401
    assert ask(400, "{}", max_new_tokens=3)["error"]["param"] == "custom_logit_processor"
    assert ask(400, OnlyToken.to_str(), max_new_tokens=3)["error"]["param"] == "custom_logit_processor"


TANGLE = """
root ::= a a a a a a a a
a ::= b b b b b b b b | [^x]
b ::= c c c c c c c c | [^y]
c ::= [a-z]* [^z] [a-z]* | root
"""


@pytest.mark.slow
def test_pathological_grammars_fail_alone_while_streams_go_on(address: str) -> None:
    """Each is refused in time or served; the streams beside them say what they say alone."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"anyOf": [{"type": "array", "items": deep}, {"type": "null"}]}
    nasty: list[dict[str, Any]] = [
        {"json_schema": {"enum": [f"value number {i} of many" for i in range(60_000)]}},
        {"json_schema": deep},
        {"json_schema": {"type": "array", "items": {"type": "integer", "multipleOf": 1021}}},
        {"regex": "(((a|b){0,90}c){0,90}d){0,90}"},
        {"regex": "(a*)*" * 40 + "b{1000}"},
        {"regex": "(.{1,10}){1,10}", "max_new_tokens": 12},
        {"ebnf": TANGLE, "max_new_tokens": 12},
    ]
    prompts = [f"Count from {i}: " for i in range(16)]
    greedy = {"temperature": 0, "max_new_tokens": 12}
    alone = [native(address, text=prompt, **greedy)["text"] for prompt in prompts]

    def try_nasty(fields: dict[str, Any]) -> int:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 4, **fields}}
        return httpx.post(f"{address}/generate", headers=HEADERS, json=body, timeout=120).status_code

    with ThreadPoolExecutor(20) as pool:
        refused = [pool.submit(try_nasty, fields) for fields in nasty]
        streams = [pool.submit(native, address, text=prompt, **greedy) for prompt in prompts]
        assert [stream.result()["text"] for stream in streams] == alone
        assert {status.result() for status in refused} <= {200, 400}
        assert 400 in {status.result() for status in refused}

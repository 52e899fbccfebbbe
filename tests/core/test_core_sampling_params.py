"""Sampling parameters: what is accepted, in which form, and what is said about the rest."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from bough.core.errors import RequestError
from bough.core.sampling_params import MAX_GRAMMAR_CHARS, SamplingParams


def test_single_values_and_lists_mean_the_same() -> None:
    one = SamplingParams.parse({"stop": "x", "stop_token_ids": 7, "stop_regex": "a+"})
    many = SamplingParams.parse({"stop": ["x"], "stop_token_ids": [7], "stop_regex": ["a+"]})
    assert one == many and one.stop == ("x",)


def test_defaults_come_from_the_model_unless_given_or_null() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    assert SamplingParams.parse(None, defaults).temperature == 0.6
    assert SamplingParams.parse({"temperature": None}, defaults).temperature == 0.6
    assert SamplingParams.parse({"temperature": 0.1}, defaults).top_k == 20


def test_greedy_by_temperature_or_top_k() -> None:
    assert SamplingParams.parse({"temperature": 0}).greedy
    assert SamplingParams.parse({"top_k": 1}).greedy
    assert not SamplingParams.parse({}).greedy


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert SamplingParams.parse({"max_new_tokens": 7.0, "sampling_seed": 2.0}) == SamplingParams.parse(
        {"max_new_tokens": 7, "sampling_seed": 2}
    )


def test_it_crosses_processes_unchanged() -> None:
    assert SamplingParams.parse({"logit_bias": {5.0: 1, np.int64(6): np.float32(2)}}).logit_bias == {5: 1.0, 6: 2.0}
    params = SamplingParams.parse({"logit_bias": {"3": -1.5}, "stop": ["a", "b"], "n": 2})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"temperatur": 1}, "temperatur", "Did you mean 'temperature'"),
        ({"wholly_unknown": 1}, "wholly_unknown", "Known fields"),
        ({"temperature": -0.1}, "temperature", "between 0 and 1000000"),
        ({"temperature": float("nan")}, "temperature", "number"),
        ({"temperature": "hot"}, "temperature", "temperature must be a number, got 'hot'"),
        ({"temperature": 1e7}, "temperature", "between 0 and 1000000"),
        ({"top_p": 0}, "top_p", r"\(0, 1\]"),
        ({"top_p": 1.1}, "top_p", r"\(0, 1\]"),
        ({"top_k": 0}, "top_k", "at least 1"),
        ({"min_p": -0.1}, "min_p", r"\[0, 1\]"),
        ({"frequency_penalty": 3}, "frequency_penalty", r"\[-2, 2\]"),
        ({"repetition_penalty": 0}, "repetition_penalty", r"\(0, 2\]"),
        ({"max_new_tokens": -1}, "max_new_tokens", "between 0 and"),
        ({"max_new_tokens": 2**31}, "max_new_tokens", "2147483647"),
        ({"max_new_tokens": 1.5}, "max_new_tokens", "must be a whole number, got 1.5"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens", "larger"),
        ({"n": 0}, "n", "between 1"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": [3]}, "stop", "list of strings, got 3"),
        ({"stop": ["a", 3]}, "stop", r"list of strings, got \('a', 3\)"),
        ({"stop": "a\ud800"}, "stop", "surrogate"),
        ({"stop_regex": ""}, "stop_regex", "empty string"),
        ({"stop_regex": "\udc00"}, "stop_regex", "surrogate"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids", "not a token id"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids", "1025 entries; at most 1024"),
        ({"stop_token_ids": "x"}, "stop_token_ids", "list of token ids, got 'x'"),
        ({"logit_bias": {2**65: 1}}, "logit_bias", "map token ids"),
        ({"logit_bias": {2**40: 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {1: 10**400}}, "logit_bias", r"logit_bias\[1\] must be between -1e\+09 and 1e\+09"),
        ({"logit_bias": {"5": 2e9}}, "logit_bias", "between"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias", "between"),
        ({"logit_bias": {"5": "100"}}, "logit_bias", "map token ids to numbers, got '5': '100'"),
        ({"logit_bias": {"5": True}}, "logit_bias", "map token ids"),
        ({"logit_bias": {"5_0": 1}}, "logit_bias", "map token ids"),
        ({"logit_bias": {" 7 ": 1}}, "logit_bias", "map token ids"),
        ({"logit_bias": {True: 1}}, "logit_bias", "map token ids"),
        ({"logit_bias": {5.5: 1}}, "logit_bias", "map token ids"),
        ({"logit_bias": {5: np.float16("inf")}}, "logit_bias", "between"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "map token ids"),
        ({"sampling_seed": 2**64}, "sampling_seed", "64-bit"),
        ({"sampling_seed": -(2**70)}, "sampling_seed", "64-bit"),
        ({"stream_interval": 0}, "stream_interval", "between 1"),
        ({"stream_interval": -3}, "stream_interval", "between 1"),
        ({"skip_special_tokens": 1}, "skip_special_tokens", "true or false, got 1"),
        ({"stop_regex": "(("}, "stop_regex", "not valid"),
        ({"stop_regex": "(" * 2000 + ")" * 2000}, "stop_regex", "nest its groups less"),
        ({"stop_regex": "(?V1)" + "[" * 1500 + "a" + "]" * 1500}, "stop_regex", "nest its groups less"),
        ({"stop_regex": "|".join(f"ab{i}" for i in range(2000))}, "stop_regex", "may have 4096"),
        ({"stop_regex": ["a" * 40 + str(i) for i in range(100)]}, "stop_regex", "may have 4096"),
        ({"stop_regex": "a{1000000}"}, "stop_regex", "repeats too much"),
        ({"stop_regex": "((a{1000}){1000}){1000}"}, "stop_regex", "repeats too much"),
        ({"stop_regex": "(?x)(?:a{1000})  # c\n { 1000 }"}, "stop_regex", "repeats too much"),
        ({"stop_regex": "a{99999999999999999999}"}, "stop_regex", "repeats too much"),
        ({"stop_regex": ["a{9999}", "b{9999}", "c{9999}"]}, "stop_regex", "repeats too much"),
        ({"stop_regex": ["a"] * 129}, "stop_regex", "at most 128"),
        ({"stop": ["a"] * 129}, "stop", "at most 128"),
        ({"stop": "a" * 20_000}, "stop", "may have 16384"),
        ({"logit_bias": [1]}, "logit_bias", "map token ids"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias", "between"),
        ({"custom_params": [1]}, "custom_params", "must be an object"),
        ({"json_schema": 5}, "json_schema", "as JSON text or as a pydantic model, got 5"),
        ({"json_schema": {"a": object()}}, "json_schema", "cannot be written as JSON"),
        ({"json_schema": "{}", "regex": "a"}, "regex", "give one of them"),
        ({"choices": ["a", 1]}, "choices", "list of strings"),
        ({"ebnf": "root ::= \ud800"}, "ebnf", "lone surrogate"),
    ],
)
def test_each_mistake_names_its_field(given: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        SamplingParams.parse(given)
    assert caught.value.field == field and caught.value.status_code == 400


def test_parameters_made_by_hand_are_checked_like_any_other() -> None:
    made = SamplingParams(stop="x", stop_token_ids=[3])  # type: ignore[arg-type]
    assert SamplingParams.parse(made) == SamplingParams(stop=("x",), stop_token_ids=(3,))
    assert SamplingParams.parse(SamplingParams(temperature=1.0), {"temperature": 0.3}).temperature == 1.0
    with pytest.raises(RequestError, match="temperature must be a number"):
        SamplingParams.parse(SamplingParams(temperature="hot"))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_every_64_bit_seed_crosses_processes(seed: int) -> None:
    params = SamplingParams.parse({"sampling_seed": seed})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_not_an_object() -> None:
    with pytest.raises(RequestError, match="must be an object"):
        SamplingParams.parse([1])  # type: ignore[arg-type]


def test_empty_parameters_ask_for_nothing() -> None:
    assert SamplingParams.parse({"custom_params": {}, "regex": None}) == SamplingParams()
    assert SamplingParams.parse(SamplingParams()) == SamplingParams()


@pytest.mark.parametrize("field", ["regex", "ebnf", "json_schema", "structural_tag"])
def test_an_empty_text_of_a_grammar_is_none_as_in_sglang(field: str) -> None:
    assert SamplingParams.parse({field: "", "choices": ["a"]}) == SamplingParams(choices=("a",))


@pytest.mark.parametrize("empty", [[], ""])
def test_empty_choices_are_not_ignored(empty: Any) -> None:
    with pytest.raises(RequestError, match="choices is empty") as refused:
        SamplingParams.parse({"choices": empty})
    assert refused.value.field == "choices"


@pytest.mark.parametrize("wrong", [3, [1], list[int]])
def test_what_is_no_schema_is_told_what_is(wrong: Any) -> None:
    with pytest.raises(RequestError, match="json_schema must be a JSON schema as an object, as JSON text or"):
        SamplingParams.parse({"json_schema": wrong})


def test_sglangs_word_for_any_json() -> None:
    assert SamplingParams.parse({"json_schema": "$$ANY$$"}).json_schema == "{}"


@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}",
        r"(?:\d{1,3}\.){3}\d{1,3}",
        r"\p{Lu}{2,}\s{0,1000000}",
        "|".join(f"word{i}" for i in range(400)),
        "(" * 40 + "a" + ")" * 40,
    ],
)
def test_ordinary_patterns_pass(pattern: str) -> None:
    assert SamplingParams.parse({"stop_regex": pattern}).stop_regex == (pattern,)


def test_schemas_may_be_objects_text_or_models() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, object]:
            return {"type": "object"}

    for given in ({"type": "object"}, '{"type": "object"}', Model):
        params = SamplingParams.parse({"json_schema": given})
        assert params.json_schema == '{"type": "object"}' and params.grammar_field == "json_schema"
    assert SamplingParams.parse({"choices": "yes"}).choices == ("yes",)
    assert SamplingParams.parse({"structural_tag": {"type": "x"}}).structural_tag == '{"type": "x"}'
    assert not SamplingParams.parse({"regex": None, "ebnf": None, "choices": None}).constrained


@pytest.mark.parametrize(
    ("field", "large"),
    [
        ("regex", "a" * (MAX_GRAMMAR_CHARS + 1)),
        ("json_schema", {"title": "a" * MAX_GRAMMAR_CHARS}),
        ("json_schema", " " * MAX_GRAMMAR_CHARS + "{}"),  # the scheduler would read it as JSON to see how short it is
        ("choices", ["ab"] * (MAX_GRAMMAR_CHARS // 8) + ["a" * MAX_GRAMMAR_CHARS]),
    ],
)
def test_a_grammar_that_is_too_long_to_read_never_reaches_the_engine(field: str, large: Any) -> None:
    with pytest.raises(RequestError, match=f"{field} has .* at most {MAX_GRAMMAR_CHARS} are read"):
        SamplingParams.parse({field: large})

"""From arguments to requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.client.inputs import InputReader, ThinkingMarks
from bough.core.errors import RequestError
from bough.core.sampling_params import SamplingParams
from bough.core.seeds import derive_seed
from bough.messages.requests import LogprobRequest, Thinking
from tests.fakes.scripted_engine import byte_level_tokenizer
from tests.fakes.tokenizer import ByteTokenizer

READER = InputReader(ByteTokenizer(), {"temperature": 0.5}, random_seed=11)  # type: ignore[arg-type]


def test_one_text_many_texts_ids_and_arrays() -> None:
    one = READER.read(prompt="ab")
    assert not one.batched and one.prompts[0].ids.tolist() == [97, 98]
    many = READER.read(prompt=["a", "b"])
    assert many.batched and len(many.prompts) == 2
    assert READER.read(input_ids=[1, 2]).prompts[0].ids.tolist() == [1, 2]
    assert READER.read(input_ids=[[1], [2]]).batched
    assert READER.read(input_ids=np.array([1, 2])).prompts[0].ids.tolist() == [1, 2]  # type: ignore[arg-type]


def test_n_makes_samples_with_seeds_of_their_own() -> None:
    samples = READER.read(prompt="a", sampling_params={"n": 3, "sampling_seed": 5}, rid="r").prompts
    assert [p.seed for p in samples] == [derive_seed(5, i) for i in range(3)]
    assert [p.rid for p in samples] == ["r-0", "r-1", "r-2"]
    assert READER.read(prompt="a").prompts[0].seed == 11


def test_null_in_a_list_means_not_given() -> None:
    columns: dict[str, Any] = {
        "return_logprob": [True, True, None],
        "logprob_start_len": [0, None, None],
        "top_logprobs_num": [None, 3, None],
        "token_ids_logprob": [[7, 8], None, None],
        "rid": ["r", None, None],
    }
    first, second, third = READER.read(prompt=["a", "b", "c"], **columns).prompts
    assert first.logprobs == LogprobRequest(0, 0, (7, 8)) and second.logprobs == LogprobRequest(-1, 3, ())
    assert third.logprobs is None and first.rid == "r" and second.rid != third.rid
    both = READER.read(prompt=["a", "b"], return_logprob=True, token_ids_logprob=[None, None]).prompts
    assert [p.logprobs for p in both] == [LogprobRequest(-1, 0, ())] * 2
    assert READER.read(prompt="a", priority=-(2**63)).prompts[0].priority == -(2**63)


def test_options_hold_for_all_or_one_by_one() -> None:
    inputs = READER.read(
        prompt=["a", "b"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
        top_logprobs_num=4,
        token_ids_logprob=[7, 8],
        extra_key="k",
        cache_salt=["s", "t"],
    )
    first, second = inputs.prompts
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (1, 2)
    assert first.sampling.temperature == 0.5
    assert first.logprobs is not None and first.logprobs.ids == (7, 8) and second.logprobs is None
    assert first.namespace != second.namespace
    assert READER.read(prompt="a", extra_key="ab").prompts[0].namespace != (
        READER.read(prompt="a", extra_key="a", cache_salt="b").prompts[0].namespace
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1]}, "list of strings"),
        ({"input_ids": "abc"}, "list of token ids"),
        ({"input_ids": [True]}, "whole numbers"),
        ({"input_ids": [1, None]}, "whole numbers, got None"),
        ({"input_ids": [[1], [2.5]]}, "whole numbers"),
        ({"input_ids": [2**40]}, "outside the vocabulary"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "1 entries for 2"),
        ({"prompt": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"prompt": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"prompt": "a", "return_logprob": True, "token_ids_logprob": ["x"]}, "token_ids_logprob"),
        ({"prompt": ["a", "b"], "token_ids_logprob": [5, None]}, "token_ids_logprob"),
        ({"prompt": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"prompt": "a", "top_logprobs_num": 4097}, "top_logprobs_num must be between 0 and 4096"),
        ({"prompt": "a", "token_ids_logprob": [-1]}, r"token ids \(0 to 2147483647\)"),
        ({"prompt": "a", "priority": "high"}, "priority"),
        ({"prompt": "a", "extra_key": 5}, "extra_key"),
        ({"prompt": {"a": 1}}, "list of strings"),
        ({"prompt": "a", "rid": 5}, "rid must be a string"),
        ({"prompt": ["a", "b"], "rid": ["x", 5]}, "rid must be a string"),
        ({"prompt": ["a", "b"], "rid": 5}, "rid must be a string"),
        ({"prompt": "a", "rid": "\ud800"}, "rid holds a lone surrogate"),
        ({"prompt": "a", "extra_key": "\ud800"}, "extra_key holds a lone surrogate"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt holds a lone surrogate"),
        ({"prompt": "a", "priority": 2**70}, "priority"),
        ({"prompt": "a", "return_logprob": True, "logprob_start_len": 2**70}, "logprob_start_len"),
        ({"prompt": "a", "return_logprob": True, "token_ids_logprob": [2**70]}, "token_ids_logprob"),
        ({"prompt": "a", "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"prompt": "a", "return_logprob": True, "token_ids_logprob": [7] * 4097}, "token_ids_logprob"),
        ({"prompt": "a", "return_logprob": True, "token_ids_logprob": 1.5}, "token_ids_logprob"),
    ],
)
def test_each_mistake_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        READER.read(**arguments)


def test_an_engine_without_tokenizer_takes_ids_only() -> None:
    with pytest.raises(RequestError, match="token ids"):
        InputReader(None, {}, None).read(prompt="a")
    for name in ("stop", "stop_regex"):
        with pytest.raises(RequestError, match=f"{name} is searched in text") as caught:
            InputReader(None, {}, None).read(input_ids=[1], sampling_params={name: "x"})
        assert caught.value.field == name


def test_a_request_answers_to_its_own_id_and_to_those_it_is_part_of() -> None:
    def names(**arguments: Any) -> list[set[str]]:
        return [set(p.names) for p in READER.read(**arguments).prompts]

    assert names(prompt="a", rid="job") == [{"job"}]
    assert names(prompt="a", rid="job", sampling_params={"n": 2}) == [{"job", "job-0"}, {"job", "job-1"}]
    assert names(prompt=["a", "b"], rid="job") == [{"job", "job-0"}, {"job", "job-1"}]
    assert names(prompt=["a", "b"], rid=["x", "y"]) == [{"x"}, {"y"}]


def test_shared_parameters_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, calls = SamplingParams.parse, []

    def counted(*given: Any) -> SamplingParams:
        calls.append(given)
        return parse(*given)

    monkeypatch.setattr(SamplingParams, "parse", counted)
    shared = READER.read(prompt=["a", "b", "c"], sampling_params={"max_new_tokens": 3}).prompts
    assert len(calls) == 1 and [p.sampling.max_new_tokens for p in shared] == [3, 3, 3]
    READER.read(prompt=["a", "b"], sampling_params=[{"n": 1}, {"n": 2}])
    assert len(calls) == 3
    alike = [{"n": 1, "temperature": 0.5, "stop": None} for _ in range(5)]
    assert len({id(p.sampling) for p in READER.read(prompt=["a"] * 5, sampling_params=alike).prompts}) == 1
    assert len(calls) == 4
    lists = [{"stop": ["x"]}, {"stop": ["x"]}]
    assert [p.sampling.stop for p in READER.read(prompt=["a", "b"], sampling_params=lists).prompts] == [("x",)] * 2


@pytest.mark.parametrize("before", [{"max_new_tokens": 1}, {"max_new_tokens": 1, "n": 1}])
def test_what_is_equal_to_something_right_may_be_wrong(before: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="max_new_tokens must be a whole number, got True"):
        READER.read(prompt=["a", "b"], sampling_params=[before, {**before, "max_new_tokens": True}])
    with pytest.raises(RequestError, match="must be an object, not list"):
        READER.read(prompt=["a", "b"], sampling_params=[before, [before]])


def test_a_call_may_be_limited_in_prompts_and_samples() -> None:
    assert len(READER.read(prompt=["a"] * 4, limit=4).prompts) == 4
    for given, field in (
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"input_ids": [[1]] * 5}, "input_ids"),
        ({"prompt": "a", "sampling_params": {"n": 5}}, "n"),
        ({"prompt": ["a", "b"], "sampling_params": {"n": 3}}, "prompt"),
    ):
        with pytest.raises(RequestError, match="more than 4 requests") as caught:
            READER.read(**given, limit=4)
        assert caught.value.field == field


def test_the_patterns_of_all_prompts_count_together() -> None:
    patterns = [{"stop_regex": chr(97 + i) * 1000} for i in range(5)]
    assert len(READER.read(prompt=["a"] * 9, sampling_params=[patterns[0]] * 9).prompts) == 9
    with pytest.raises(RequestError, match="all patterns of a request") as caught:
        READER.read(prompt=["a"] * 5, sampling_params=patterns)
    assert caught.value.field == "stop_regex"


def test_marks_of_thinking_become_tokens() -> None:
    marks = ThinkingMarks("<t>", "</t>", "stop</t>", begun=True, budget=7)
    (prompt,) = byte_reader().read(prompt="a", thinking=marks).prompts
    assert prompt.thinking == Thinking(tuple(b"<t>"), tuple(b"</t>"), tuple(b"stop</t>"), True, 7)
    with pytest.raises(RequestError, match="tokenizer"):
        InputReader(None, {}, None).read(input_ids=[1], thinking=marks)


def byte_reader() -> InputReader:
    return InputReader(byte_level_tokenizer(), {}, None)


def test_the_place_where_a_prompt_is_computed() -> None:
    def places(**fields: Any) -> list[Any]:
        inputs = READER.read(input_ids=[[1], [2]], **fields)
        return [None if p.bootstrap is None else (p.bootstrap.port, p.bootstrap.room) for p in inputs.prompts]

    assert places() == [None, None]
    assert places(bootstrap_host="a", bootstrap_port=[1, None]) == [(1, None), (8998, None)]
    assert places(bootstrap_host=["a", "b"], bootstrap_room=[7, 9]) == [(8998, 7), (8998, 9)]
    assert places(bootstrap_host="a", bootstrap_room=7) == [(8998, 7), (8998, 8)]
    samples = places(bootstrap_room=[7, 9], sampling_params={"n": 2})
    assert samples == places(bootstrap_room=[7, 9], sampling_params={"n": 2}) and len({r for _, r in samples}) == 4
    with pytest.raises(RequestError, match="bootstrap_room has 3 entries for 2 prompts"):
        places(bootstrap_room=[7, 8, 9])
    for fields in ({"bootstrap_room": 2**63 - 1}, {"bootstrap_room": [-1, 2]}, {"bootstrap_port": [1, 65536]}):
        with pytest.raises(RequestError, match="must be a whole number from 0 to"):
            places(bootstrap_host="a", **fields)
    assert places(bootstrap_host="a", bootstrap_room=[2**63 - 1, 0]) == [(8998, 2**63 - 1), (8998, 0)]

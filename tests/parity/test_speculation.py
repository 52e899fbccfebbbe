"""Speculation changes how many steps an answer takes, and nothing of what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import bough
from tests.parity.engines import fp32_engine

CODE = """def read_config(path):
    with open(path) as handle:
        data = json.load(handle)
    return data

def write_config(path, data):
    with open(path, "w") as handle:
        json.dump(data, handle)
"""
TASKS = [
    f"{CODE}\n# The same with `handle` renamed to `file`:\n\ndef read_config(path):\n",
    "Ann has 3 apples, Ben has 4 apples, Cem has 5 apples.\nIn short: Ann has",
    '[{"name": "Ann", "age": 3}, {"name": "Ben", "age": 4}, {"name":',
    "The rose is red. The violet is blue. The sugar is sweet. The rose is",
]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.4},
    {"repetition_penalty": 1.2, "min_new_tokens": 20},
    {"regex": "( [a-z]+,){4} and [a-z]+\\."},
    {"stop": ["\n\n", "apples,"]},
    {"temperature": 0.9, "sampling_seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "sampling_seed": 8, "logit_bias": {"28": 2.0}},
    {"json_schema": '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'},
]
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_adaptive": False}


@pytest.fixture(scope="module")
def without() -> Iterator[bough.Engine]:
    with fp32_engine(device="cpu") as engine:
        yield engine


@pytest.fixture(
    scope="module",
    params=[
        "all drafts",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("no overlap", "adaptive", "torch")),
    ],
)
def speculating(request: pytest.FixtureRequest) -> Iterator[bough.Engine]:
    more: dict[str, Any] = {
        "all drafts": {},
        "no overlap": {"disable_overlap_schedule": True},
        "adaptive": {"speculative_adaptive": True},
        "torch": {"attention_backend": "torch"},
    }[request.param]
    with fp32_engine(device="cpu", **{**NGRAM, **more}) as engine:
        yield engine


def answers(engine: bough.Engine, tokens: int, *, at_once: bool) -> list[dict[str, Any]]:
    prompts = [task for task in TASKS for _ in VARIANTS]
    params = [{"temperature": 0.0, "max_new_tokens": tokens, **variant} for _ in TASKS for variant in VARIANTS]
    engine.flush_cache()
    if at_once:
        found = engine.generate(prompts, params, return_logprob=True)
    else:
        found = [engine.generate(p, s, return_logprob=True) for p, s in zip(prompts[::5], params[::5], strict=True)]
    return list(found)


def said(answer: dict[str, Any]) -> tuple[Any, ...]:
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


def check(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert [said(answer) for answer in found] == [said(answer) for answer in expected]
    for one, other in zip(expected, found, strict=True):
        values = [[logprob for logprob, *_ in a["meta_info"]["output_token_logprobs"]] for a in (one, other)]
        assert values[1] == pytest.approx(values[0], abs=1e-3)


@pytest.mark.slow
def test_answers_are_those_without(without: bough.Engine, speculating: bough.Engine) -> None:
    """Greedy and seeded, with penalties, grammars, stops and logprobs: alone, and all at once."""
    for at_once in (False, True):
        expected, found = (answers(engine, 32, at_once=at_once) for engine in (without, speculating))
        check(expected, found)
        meta = [answer["meta_info"] for answer in found]
        adaptive = speculating.settings.speculative.speculative_adaptive  # then it depends on the machine
        assert adaptive or sum(m["spec_num_correct_drafts"] for m in meta) > 20
        for m in meta:
            histogram = m["spec_accept_histogram"]
            assert sum(histogram) == m["spec_verify_ct"] <= m["completion_tokens"] + 1
            assert sum(i * n for i, n in enumerate(histogram)) == m["spec_num_correct_drafts"]
            assert m["spec_num_correct_drafts"] <= m["spec_num_proposed_drafts"]
    assert "spec_verify_ct" not in expected[0]["meta_info"]


@pytest.mark.long
def test_long_answers_are_those_without(without: bough.Engine, speculating: bough.Engine) -> None:
    for at_once in (False, True):
        check(*(answers(engine, 128, at_once=at_once) for engine in (without, speculating)))


@pytest.mark.slow
def test_every_turn_of_a_conversation_finds_as_much_in_the_cache(
    without: bough.Engine, speculating: bough.Engine
) -> None:
    cached = []
    for engine in (without, speculating):
        engine.flush_cache()
        ids, counts = [504, 1210, 30, 28, 504, 1210, 30, 28, 504], []
        for turn in range(3):
            found = engine.generate(
                input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
            )
            counts.append(found["meta_info"]["cached_tokens"])
            ids = [*ids, *found["output_ids"], 100 + turn, 504]
        cached.append(counts)
    assert cached[0] == cached[1] and cached[0][-1] > 0

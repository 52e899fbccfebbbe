"""The engine gives the tokens of `transformers`, whatever way it takes to them: alone or together, from the cache, in
chunks, on pages of any size, after retractions, with and without overlap.

The quick scenarios turn several switches at once; the long ones turn each by itself, so that a difference names its
cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import bough
from bough.loader import catalogue
from tests.parity.engines import fp32_engine
from tests.parity.golden import NEW_TOKENS, PROMPT_COUNT, SMALLEST_GAP, Golden, Sample

GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
FEW = 4  # samples of the quick run
# Fits the longest sample, but not what many short ones grow to: with next to nothing reserved for their outputs, more
# are let in than can end.
CRAMPED: dict[str, Any] = {"max_total_tokens": 1024, "schedule_conservativeness": 0.02}


def generate(engine: bough.Engine, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    outputs = engine.generate(input_ids=[sample.prompt for sample in samples], sampling_params=GREEDY)
    assert isinstance(outputs, list)
    return outputs


def assert_golden(outputs: Sequence[dict[str, Any]], samples: Sequence[Sample]) -> None:
    """Every output is the golden one; a failure names the samples and where each goes astray."""
    astray: dict[str, str] = {}
    for output, sample in zip(outputs, samples, strict=True):
        pairs = enumerate(zip(output["output_ids"], sample.output, strict=False))
        first = next((i for i, (ours, theirs) in pairs if ours != theirs), len(output["output_ids"]))
        if output["output_ids"] != sample.output:
            astray[sample.name] = f"differs at token {first} of {len(sample.output)}"
    assert not astray
    for output, sample in zip(outputs, samples, strict=True):
        assert output["meta_info"]["finish_reason"] == {"type": "length", "length": NEW_TOKENS}
        assert output["meta_info"]["prompt_tokens"] == len(sample.prompt)
        assert output["meta_info"]["completion_tokens"] == NEW_TOKENS


def few_of(golden: Golden) -> Sequence[Sample]:
    return golden.samples[:: PROMPT_COUNT // FEW][:FEW]


def cached(outputs: Sequence[dict[str, Any]]) -> list[int]:
    return [output["meta_info"]["cached_tokens"] for output in outputs]


def retractions(outputs: Sequence[dict[str, Any]]) -> int:
    return sum(output["meta_info"]["num_retractions"] for output in outputs)


def test_golden_file_is_of_this_model_and_holds_no_near_ties(golden: Golden) -> None:
    assert golden.made["gguf_sha256"] == catalogue.DEFAULT.source.sha256
    assert len({sample.name for sample in golden.samples}) == PROMPT_COUNT
    assert {len(sample.output) for sample in golden.samples} == {NEW_TOKENS}
    assert min(sample.gap for sample in golden.samples) >= SMALLEST_GAP


def test_few_at_once_then_again_from_the_cache(engine: bough.Engine, golden: Golden) -> None:
    assert_at_once_and_cached(engine, few_of(golden))


@pytest.mark.long
def test_all_at_once_then_again_from_the_cache(engine: bough.Engine, golden: Golden) -> None:
    assert_at_once_and_cached(engine, golden.samples)


def assert_at_once_and_cached(engine: bough.Engine, samples: Sequence[Sample]) -> None:
    page = engine.settings.memory.page_size
    first = generate(engine, samples)
    assert_golden(first, samples)
    assert retractions(first) == 0
    again = generate(engine, samples)
    assert_golden(again, samples)
    # All but the last token, which must be computed to have something to sample from.
    assert cached(again) == [(len(sample.prompt) - 1) // page * page for sample in samples]


def test_few_alone(token_engine: bough.Engine, golden: Golden) -> None:
    assert_each_alone(token_engine, few_of(golden)[:3])


@pytest.mark.long
def test_all_alone(engine: bough.Engine, golden: Golden) -> None:
    assert_each_alone(engine, golden.samples)


def assert_each_alone(engine: bough.Engine, samples: Sequence[Sample]) -> None:
    """One by one on an empty cache."""
    for sample in samples:
        assert engine.flush_cache()
        outputs = generate(engine, [sample])
        assert cached(outputs) == [0]
        assert_golden(outputs, [sample])


@pytest.mark.slow
def test_retraction(golden: Golden) -> None:
    samples = golden.samples[::2]
    with fp32_engine(**CRAMPED) as engine:
        outputs = generate(engine, samples)
        assert retractions(outputs) > 0
        assert_golden(outputs, samples)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"disable_overlap_schedule": True}, id="no overlap"),
        pytest.param({"enable_mixed_chunk": False}, id="no mixed chunks"),
        pytest.param({"chunked_prefill_size": 32}, id="chunks of 32"),
        pytest.param({"chunked_prefill_size": -1}, id="no chunks"),
        pytest.param({"page_size": 16}, id="pages of 16"),
        pytest.param({"disable_radix_cache": True}, id="no cache"),
        pytest.param({"max_running_requests": 3}, id="three at a time"),
    ],
)
def test_each_switch(settings: dict[str, Any], golden: Golden) -> None:
    with fp32_engine(**settings) as engine:
        for _ in range(2):  # the second time from the cache
            assert_golden(generate(engine, golden.samples), golden.samples)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"disable_overlap_schedule": True}, id="no overlap"),
        pytest.param({"enable_mixed_chunk": False}, id="no mixed chunks"),
        pytest.param({"chunked_prefill_size": 32}, id="chunks of 32"),
        pytest.param({"page_size": 16}, id="pages of 16"),
        pytest.param({"disable_radix_cache": True}, id="no cache"),
    ],
)
def test_each_switch_with_retractions(settings: dict[str, Any], golden: Golden) -> None:
    with fp32_engine(**CRAMPED, **settings) as engine:
        outputs = generate(engine, golden.samples)
        assert retractions(outputs) > 0
        assert_golden(outputs, golden.samples)

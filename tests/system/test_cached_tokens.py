"""`cached_tokens` says exactly how much of a prompt came from the cache: the whole pages of what it shares with earlier
ones, and never its last token, which must be computed to have something to sample from.

Prompts are random ids, no id twice in a test: two prompts share what was meant to be shared and nothing else. The
model is a tiny one with a large vocabulary: what it says does not matter here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

import bough
from tests.conftest import TINY_LLAMA

VOCABULARY = range(1000, 49000)
GREEDY = {"temperature": 0, "ignore_eos": True}


class FreshIds:
    """Random ids, none given out twice."""

    def __init__(self) -> None:
        self._ids: Iterator[int] = iter(random.Random(1).sample(VOCABULARY, 10_000))

    def take(self, count: int) -> list[int]:
        return list(islice(self._ids, count))


@pytest.fixture(scope="module", params=[1, 16])
def tiny_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[bough.Engine]:
    folder = tmp_path_factory.mktemp("wide-llama")
    (folder / "config.json").write_text(
        json.dumps({**TINY_LLAMA, "vocab_size": 49_152, "max_position_embeddings": 1024})
    )
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_total_tokens": 4096, "cpu_threads": 1}
    with bough.Engine(model=folder, page_size=request.param, chunked_prefill_size=64, **settings) as engine:
        yield engine


@pytest.fixture
def engine(tiny_engine: bough.Engine) -> bough.Engine:
    assert tiny_engine.flush_cache()
    return tiny_engine


@pytest.fixture
def ids() -> FreshIds:
    return FreshIds()


def generate(engine: bough.Engine, prompt: list[int], new_tokens: int = 1, **options: Any) -> dict[str, Any]:
    output = engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": new_tokens}, **options)
    assert isinstance(output, dict)
    return output


def generate_all(engine: bough.Engine, prompts: list[list[int]], **sampling: Any) -> list[int]:
    """What each prompt of one batch found in the cache."""
    sampling_params = {**GREEDY, "max_new_tokens": 1, **sampling}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling_params)
    assert isinstance(outputs, list)
    return [output["meta_info"]["cached_tokens"] for output in outputs]


def cached(engine: bough.Engine, prompt: list[int], **options: Any) -> int:
    found: int = generate(engine, prompt, **options)["meta_info"]["cached_tokens"]
    return found


def whole_pages(engine: bough.Engine, tokens: int) -> int:
    page = engine.settings.memory.page_size
    return tokens // page * page


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 300])
def test_a_shared_prefix_to_the_token(engine: bough.Engine, ids: FreshIds, length: int) -> None:
    prefix = ids.take(length)
    assert cached(engine, prefix + ids.take(20)) == 0
    assert cached(engine, prefix + ids.take(20)) == whole_pages(engine, length)
    assert cached(engine, prefix + ids.take(1)) == whole_pages(engine, length)


def test_prefixes_that_part_at_different_places(engine: bough.Engine, ids: FreshIds) -> None:
    trunk = ids.take(120)
    assert cached(engine, trunk) == 0
    for kept in (90, 47, 48, 110, 3):
        assert cached(engine, trunk[:kept] + ids.take(20)) == whole_pages(engine, kept)


def test_nothing_shared(engine: bough.Engine, ids: FreshIds) -> None:
    tail = ids.take(64)
    assert cached(engine, ids.take(1) + tail) == 0
    assert cached(engine, ids.take(1) + tail) == 0  # a common end is no common beginning


@pytest.mark.parametrize("length", [1, 2, 16, 17, 65])
def test_the_same_prompt_again(engine: bough.Engine, ids: FreshIds, length: int) -> None:
    prompt = ids.take(length)
    assert cached(engine, prompt) == 0
    assert cached(engine, prompt) == whole_pages(engine, length - 1)


def test_a_beginning_of_an_earlier_prompt(engine: bough.Engine, ids: FreshIds) -> None:
    prompt = ids.take(100)
    assert cached(engine, prompt) == 0
    for length in (80, 33, 32):
        assert cached(engine, prompt[:length]) == whole_pages(engine, length - 1)


def test_a_prompt_that_goes_on(engine: bough.Engine, ids: FreshIds) -> None:
    prompt = ids.take(50)
    assert cached(engine, prompt) == 0
    assert cached(engine, prompt + ids.take(30)) == whole_pages(engine, 50)


def test_a_growing_conversation(engine: bough.Engine, ids: FreshIds) -> None:
    prompt, computed, answer = ids.take(45), 0, 9
    for _ in range(4):
        output = generate(engine, prompt, new_tokens=answer)
        assert output["meta_info"]["cached_tokens"] == whole_pages(engine, computed)
        # The last token of an output is sampled but never fed back.
        computed = len(prompt) + answer - 1
        prompt = prompt + output["output_ids"] + ids.take(13)


def test_one_batch_shares_a_prefix(engine: bough.Engine, ids: FreshIds) -> None:
    prefix = ids.take(75)
    found = generate_all(engine, [prefix + ids.take(10) for _ in range(5)])
    assert found == [0] + [whole_pages(engine, 75)] * 4


def test_one_batch_shares_a_prefix_longer_than_a_chunk(engine: bough.Engine, ids: FreshIds) -> None:
    prefix = ids.take(600)
    found = generate_all(engine, [prefix + ids.take(10) for _ in range(3)])
    assert found == [0] + [whole_pages(engine, 600)] * 2


def test_one_batch_of_two_families(engine: bough.Engine, ids: FreshIds) -> None:
    left, right = ids.take(40), ids.take(55)
    prompts = [family + ids.take(5) for family in (left, right, left, right, right)]
    pages = [whole_pages(engine, len(family)) for family in (left, right)]
    assert generate_all(engine, prompts) == [0, 0, pages[0], pages[1], pages[1]]


def test_samples_of_one_prompt_share_it(engine: bough.Engine, ids: FreshIds) -> None:
    prompt = ids.take(50)
    assert generate_all(engine, [prompt], n=3) == [0] + [whole_pages(engine, 49)] * 2


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_namespaces_share_nothing(engine: bough.Engine, ids: FreshIds, name: str) -> None:
    prompt = ids.take(40)
    spaces: list[dict[str, str]] = [{}, {name: "a"}, {name: "b"}, {name: "ab"}]
    assert [cached(engine, prompt, **space) for space in spaces] == [0] * len(spaces)
    assert [cached(engine, prompt, **space) for space in spaces] == [whole_pages(engine, 39)] * len(spaces)


def test_extra_key_and_cache_salt_are_not_run_together(engine: bough.Engine, ids: FreshIds) -> None:
    prompt = ids.take(40)
    assert cached(engine, prompt, extra_key="a", cache_salt="b") == 0
    for space in ({"extra_key": "ab"}, {"cache_salt": "ab"}, {"extra_key": "b", "cache_salt": "a"}):
        assert cached(engine, prompt, **space) == 0
    assert cached(engine, prompt, extra_key="a", cache_salt="b") == whole_pages(engine, 39)


def test_flushing_forgets_everything(engine: bough.Engine, ids: FreshIds) -> None:
    prompt = ids.take(40)
    generate(engine, prompt)
    assert engine.flush_cache()
    assert cached(engine, prompt) == 0

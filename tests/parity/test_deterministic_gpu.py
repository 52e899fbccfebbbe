"""Deterministic inference on a GPU in bfloat16: however a request is served, its tokens and logprobs are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from bough import Engine

pytestmark = pytest.mark.gpu

BF16: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_total_tokens": 60_000,
    "enable_deterministic_inference": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "no overlap": {"disable_overlap_schedule": True},
    "no cache": {"disable_radix_cache": True},
    "short chunks, pages of 16": {"chunked_prefill_size": 48, "page_size": 16},
    "retraction": {"max_total_tokens": 4096, "schedule_conservativeness": 0.02},
}
ALONE = 16


class Load:
    """256 mixed requests: prompts of 5 to 120 tokens, a few of them long, some with a common beginning."""

    def __init__(self, temperature: float) -> None:
        rng = random.Random(5)
        shared = [rng.randint(10, 40_000) for _ in range(50)]
        self.prompts = [[rng.randint(10, 40_000) for _ in range(rng.randint(5, 120))] for _ in range(256)]
        self.prompts[::7] = [shared + prompt for prompt in self.prompts[::7]]
        self.prompts[3] = [rng.randint(10, 40_000) for _ in range(1500)]  # several chunks of keys
        self.sampling = [
            {"temperature": temperature, "max_new_tokens": rng.randint(4, 48), "ignore_eos": True} for _ in self.prompts
        ]

    def all(self, engine: Engine, logprobs: bool = True) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = engine.generate(
            input_ids=self.prompts, sampling_params=self.sampling, return_logprob=logprobs
        )
        return outputs

    def one(self, engine: Engine, number: int) -> dict[str, Any]:
        output: dict[str, Any] = engine.generate(
            input_ids=self.prompts[number], sampling_params=self.sampling[number], return_logprob=True
        )
        return output


def said(output: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens, and their logprobs to the last bit."""
    return output["output_ids"], [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]


def settle(engine: Engine) -> None:
    """Waits until the graphs are captured."""
    while engine.get_server_info()["internal_states"][0]["warming_up"]:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(**BF16) as started:
        settle(started)
        yield started


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_company_and_cache_change_nothing(engine: Engine, temperature: float) -> None:
    load = Load(temperature)
    engine.flush_cache()
    first = [said(output) for output in load.all(engine)]
    warm = load.all(engine)
    assert sum(output["meta_info"]["cached_tokens"] for output in warm) > 10_000
    assert [said(output) for output in warm] == first, "with cached prompts"
    unscored = load.all(engine, logprobs=False)  # sampled inside the graphs
    assert [output["output_ids"] for output in unscored] == [ids for ids, _ in first], "without logprobs"
    for number in range(ALONE):
        engine.flush_cache()
        assert said(load.one(engine, number)) == first[number], f"request {number} alone"


def test_company_with_penalties_and_filters_changes_nothing(engine: Engine) -> None:
    """Such rows make the whole batch take other ways through the sampler."""
    load = Load(0.9)
    plain = [said(output) for output in load.all(engine)]
    for number in range(0, 256, 2):
        load.sampling[number] |= {"frequency_penalty": 0.5, "top_p": 0.9, "top_k": 50}
    mixed = [said(output) for output in load.all(engine)]
    assert mixed[1::2] == plain[1::2]


def test_the_way_of_serving_changes_nothing() -> None:
    load, results = Load(0.0), {}
    for name, settings in VARIANTS.items():
        with Engine(**{**BF16, **settings}) as started:
            settle(started)
            outputs = load.all(started)
        results[name] = [said(output) for output in outputs]
        if name == "retraction":
            assert sum(output["meta_info"]["num_retractions"] for output in outputs) > 0
    different = {
        name: sum(a != b for a, b in zip(result, results["graphs"], strict=True)) for name, result in results.items()
    }
    assert different == dict.fromkeys(VARIANTS, 0)

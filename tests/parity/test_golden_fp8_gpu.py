"""What 8-bit weights and caches cost in accuracy: the default model on a GPU, given the golden tokens.

Each variant says at how many positions its best token is the golden one, and how far its logprobs of the golden tokens
are from those of float32. `pytest -m gpu -s tests/parity/test_golden_fp8_gpu.py` prints the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from bough import Engine
from tests.parity.golden import Golden

pytestmark = pytest.mark.gpu

ROOM: dict[str, Any] = {"device": "cuda", "max_total_tokens": 60_000}
# A prompt that is computed in one go never reads its own keys and values back: short chunks do.
SHORT_CHUNKS = {"chunked_prefill_size": 8, "disable_radix_cache": True}
VARIANTS: dict[str, tuple[dict[str, Any], float, float]] = {  # settings, least agreement, most distance
    "bfloat16": ({}, 0.96, 0.06),
    "bfloat16, read back": ({**SHORT_CHUNKS}, 0.96, 0.06),
    "fp8 weights": ({"quantization": "fp8"}, 0.89, 0.20),
    "fp8_e4m3 cache": ({"kv_cache_dtype": "fp8_e4m3", **SHORT_CHUNKS}, 0.93, 0.12),
    "fp8_e5m2 cache": ({"kv_cache_dtype": "fp8_e5m2", **SHORT_CHUNKS}, 0.88, 0.20),
    "fp8 weights, fp8_e4m3 cache": ({"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3", **SHORT_CHUNKS}, 0.88, 0.25),
}


@dataclass(frozen=True)
class Forced:
    """The best token and the golden token's logprob at every golden position."""

    best: list[int]
    logprobs: list[float]


def forced(golden: Golden, settings: dict[str, Any]) -> Forced:
    with Engine(**{**ROOM, **settings}) as engine:
        outputs = engine.generate(
            input_ids=[s.prompt + s.output for s in golden.samples],
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=[len(s.prompt) - 1 for s in golden.samples],
            top_logprobs_num=1,
        )
    infos = [output["meta_info"] for output in outputs]
    best = [entry[0][1] for info in infos for entry in info["input_top_logprobs"][1:]]
    return Forced(best, [entry[0] for info in infos for entry in info["input_token_logprobs"][1:]])


@pytest.fixture(scope="module")
def exact(golden: Golden) -> Forced:
    return forced(golden, {"dtype": "float32", "quantization": "none"})


@pytest.mark.parametrize("name", VARIANTS)
def test_the_best_token_and_its_logprob_stay_near(name: str, golden: Golden, exact: Forced) -> None:
    settings, least, most = VARIANTS[name]
    found = forced(golden, {"dtype": "bfloat16", **settings})
    tokens = [token for sample in golden.samples for token in sample.output]
    agreed = sum(a == b for a, b in zip(found.best, tokens, strict=True)) / len(tokens)
    pairs = zip(found.logprobs, exact.logprobs, strict=True)
    distance = sum(abs(a - b) for a, b in pairs) / len(tokens)
    print(f"{name}: best token agrees at {agreed:.2%} of positions; logprobs differ by {distance:.4f} on average")
    assert agreed >= least
    assert distance <= most

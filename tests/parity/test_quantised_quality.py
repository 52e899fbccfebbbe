"""What quantised weights cost on the default model: next to nothing, in both ways of multiplying.

Prompts may be multiplied by matrix tiles; output tokens, and with deterministic inference prompts too, take activations
of 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bough.native.library import load_library
from tests.bench.perplexity import REFERENCE, Quality, Sample, measure, read_text
from tests.parity.golden import Golden

pytestmark = pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not compiled")
PLAIN: dict[str, Any] = {"max_total_tokens": 8192, "device": "cpu"}


@pytest.fixture(scope="module")
def exact() -> Iterator[Quality]:
    yield measure({**PLAIN, **REFERENCE}, read_text(None), [])


@pytest.mark.long
@pytest.mark.parametrize("one_way", [False, True], ids=["as served", "activations of 8 bits"])
def test_perplexity_is_within_a_hundredth_of_float32(exact: Quality, golden: Golden, one_way: bool) -> None:
    samples = [Sample(sample.prompt, sample.output) for sample in golden.samples]
    found = measure({**PLAIN, "enable_deterministic_inference": one_way}, read_text(None), samples)
    assert found.tokens == exact.tokens > 3000
    assert abs(found.perplexity / exact.perplexity - 1) < 0.01
    assert found.best_agrees is not None and found.best_agrees > 0.97


@pytest.mark.slow
def test_the_best_tokens_are_nearly_those_of_float32(golden: Golden) -> None:
    """A sample of the above."""
    samples = [Sample(sample.prompt, sample.output) for sample in golden.samples[::4]]
    found = measure(PLAIN, read_text(None)[:2000], samples)
    assert found.best_agrees is not None and found.best_agrees > 0.97

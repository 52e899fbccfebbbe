"""The default model on a GPU with each pair of attention back ends: in float32 all give the golden tokens."""

from __future__ import annotations

import pytest

from bough import Engine
from tests.parity.golden import NEW_TOKENS, Golden

pytestmark = pytest.mark.gpu

GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
BACKENDS = ("triton", "torch")


@pytest.mark.parametrize("prefill", BACKENDS)
@pytest.mark.parametrize("decode", BACKENDS)
def test_float32_gives_the_golden_tokens(golden: Golden, prefill: str, decode: str) -> None:
    with Engine(
        device="cuda",
        dtype="float32",
        quantization="none",
        max_total_tokens=60_000,
        chunked_prefill_size=64,  # so that decodes, first chunks and later chunks share steps
        prefill_attention_backend=prefill,
        decode_attention_backend=decode,
    ) as engine:
        for _ in range(2):  # the second time behind cached prefixes
            outputs = engine.generate(input_ids=[s.prompt for s in golden.samples], sampling_params=GREEDY)
            assert [output["output_ids"] for output in outputs] == [s.output for s in golden.samples]

"""On the default model as users run it, quantised: what is computed beside a request does not change its output."""

from __future__ import annotations

from typing import Any

import pytest

from bough import Engine
from bough.native.library import instruction_sets, load_library

LIBRARY = load_library()
SETS = [] if LIBRARY is None else instruction_sets(LIBRARY)
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the CPU kernels are not compiled")

PROMPTS = ["The capital of France is", "Write a story about a dragon who could not fly:", "def fib(n):"]
NEW_TOKENS = 16


def outputs(engine: Engine, prompts: list[str], tokens: int = NEW_TOKENS) -> list[tuple[list[int], list[float]]]:
    """Tokens, and their logprobs to the last bit."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answers: Any = engine.generate(prompts, sampling_params=sampling, return_logprob=True)
    return [(a["output_ids"], [entry[0] for entry in a["meta_info"]["output_token_logprobs"]]) for a in answers]


@pytest.mark.slow
@pytest.mark.parametrize("instructions", SETS)
def test_alone_together_chunked_and_cached_are_the_same_to_the_last_bit(instructions: str) -> None:
    settings: dict[str, Any] = {"max_total_tokens": 8192, "cpu_instruction_set": instructions}
    # Plain C takes a second a token.
    prompts, tokens = (PROMPTS[:2], 3) if instructions == "plain" else (PROMPTS, NEW_TOKENS)
    with Engine(**settings) as engine:
        alone = [outputs(engine, [prompt], tokens)[0] for prompt in prompts]
        assert outputs(engine, prompts, tokens) == alone  # from the cache
        engine.flush_cache()
        assert outputs(engine, prompts, tokens) == alone
    with Engine(**settings, chunked_prefill_size=4, cpu_threads=1) as engine:
        assert outputs(engine, prompts, tokens) == alone


@pytest.mark.slow
def test_with_determinism_an_answer_has_the_same_bits_as_part_of_a_prompt() -> None:
    with Engine(max_total_tokens=8192, enable_deterministic_inference=True) as engine:
        for prompt in PROMPTS:
            [(tokens, logprobs)] = outputs(engine, [prompt])
            engine.flush_cache()
            assert engine.tokenizer is not None
            ids = engine.tokenizer.encode(prompt)
            answer: Any = engine.generate(
                input_ids=[*ids, *tokens],
                sampling_params={"max_new_tokens": 1, "temperature": 0},
                return_logprob=True,
                logprob_start_len=len(ids) - 1,
            )
            again = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
            assert again[-len(logprobs) :] == logprobs

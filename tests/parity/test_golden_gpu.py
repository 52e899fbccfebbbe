"""The default model on a GPU: float32 gives the CPU's tokens, bfloat16 nearly always the same best token, and graphs,
overlap and retraction change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from bough import Engine
from tests.parity.golden import NEW_TOKENS, Golden

pytestmark = pytest.mark.gpu

GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
FEW_ROWS, FEW_TOKENS = 8, 4
FP32: dict[str, Any] = {"device": "cuda", "dtype": "float32", "quantization": "none", "max_total_tokens": 60_000}


def outputs_of(engine: Engine, golden: Golden) -> list[list[int]]:
    outputs = engine.generate(input_ids=[s.prompt for s in golden.samples], sampling_params=GREEDY)
    return [output["output_ids"] for output in outputs]


def settle(engine: Engine) -> None:
    """Waits until the graphs are captured."""
    while engine.get_server_info()["internal_states"][0]["warming_up"]:
        pass


def test_float32_gives_the_golden_tokens(golden: Golden) -> None:
    expected = [s.output for s in golden.samples]
    with Engine(**FP32) as engine:
        assert outputs_of(engine, golden) == expected, "eager"
        settle(engine)
        assert outputs_of(engine, golden) == expected, "graphs, cached prompts"
        engine.flush_cache()
        alone = [engine.generate(input_ids=s.prompt, sampling_params=GREEDY)["output_ids"] for s in golden.samples[:6]]
        assert alone == expected[:6]


def test_bfloat16_agrees_at_nearly_every_position(golden: Golden) -> None:
    agreed = total = 0
    with Engine(device="cuda", dtype="bfloat16", max_total_tokens=60_000) as engine:
        outputs = engine.generate(
            input_ids=[s.prompt + s.output for s in golden.samples],
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=[len(s.prompt) - 1 for s in golden.samples],
            top_logprobs_num=1,
        )
        free = outputs_of(engine, golden)
    for output, sample in zip(outputs, golden.samples, strict=True):
        best = [entry[0][1] for entry in output["meta_info"]["input_top_logprobs"][1:]]
        agreed += sum(a == b for a, b in zip(best, sample.output, strict=True))
        total += len(sample.output)
    same = sum(a == s.output for a, s in zip(free, golden.samples, strict=True))
    print(f"bfloat16: best token agrees at {agreed / total:.2%} of positions; {same} of {len(free)} run freely alike")
    assert agreed / total >= 0.96


@pytest.mark.parametrize("graphs", [False, True])
def test_few_bfloat16_decodes_at_a_time_agree_as_well(graphs: bool, golden: Golden) -> None:
    """Few rows take kernels of their own, which neither prompts nor 32 decodes at once go through."""
    starts = [(s, at) for s in golden.samples for at in range(0, NEW_TOKENS - FEW_TOKENS + 1, FEW_TOKENS)]
    sampling = {**GREEDY, "max_new_tokens": FEW_TOKENS}
    agreed = total = 0
    with Engine(device="cuda", dtype="bfloat16", max_total_tokens=60_000, disable_cuda_graph=not graphs) as engine:
        settle(engine)
        for first in range(0, len(starts), FEW_ROWS):
            some = starts[first : first + FEW_ROWS]
            outputs = engine.generate(input_ids=[s.prompt + s.output[:at] for s, at in some], sampling_params=sampling)
            for (sample, at), output in zip(some, outputs, strict=True):
                made, expected = output["output_ids"], sample.output[at : at + FEW_TOKENS]
                for i in range(1, FEW_TOKENS):  # the first is the prompt's; behind a difference nothing is comparable
                    if made[:i] == expected[:i]:
                        agreed += made[i] == expected[i]
                        total += 1
    print(f"bfloat16, {FEW_ROWS} decodes at a time: the token agrees at {agreed / total:.2%} of {total} positions")
    assert total > len(starts) * 2 and agreed / total >= 0.96


def test_graphs_overlap_and_retraction_change_nothing_in_float32() -> None:
    import random

    rng = random.Random(5)
    prompts = [[rng.randint(10, 40_000) for _ in range(rng.randint(5, 120))] for _ in range(256)]
    sampling = [{"temperature": 0, "max_new_tokens": rng.randint(4, 48), "ignore_eos": True} for _ in prompts]
    variants: dict[str, dict[str, Any]] = {
        "eager": {"disable_cuda_graph": True},
        "graphs": {},
        "no overlap": {"disable_overlap_schedule": True},
        "retraction": {"max_total_tokens": 4096, "schedule_conservativeness": 0.02},
    }
    results = {}
    for name, settings in variants.items():
        with Engine(**{**FP32, **settings}) as engine:
            settle(engine)
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        results[name] = [output["output_ids"] for output in outputs]
        if name == "retraction":
            assert sum(output["meta_info"]["num_retractions"] for output in outputs) > 0
    assert all(result == results["eager"] for result in results.values())

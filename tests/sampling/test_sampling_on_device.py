"""The kernels behind `sample` draw what the CPU path draws, count what it counts, and leave the scratch row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_reference import make_setup
from torch import Tensor

pytest.importorskip("triton")

from bough.core.plan import LogprobSpec
from bough.sampling.logprobs import output_logprobs, score_inputs
from bough.sampling.sampler import sample, sample_rows_on_device
from bough.sampling.state import SamplingState

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on whose scalars the interpreter computes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB_SIZE = 300
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.8},
    {"min_p": 0.05},
    {"logit_bias": {7: 5.0}, "top_p": 0.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"min_new_tokens": 2, "stop_ids": (4, 5), "temperature": 0.0},
]


def randn(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def make_state(device: str, kinds: list[dict[str, Any]]) -> SamplingState:
    state = SamplingState(len(kinds), VOCAB_SIZE, device)
    state.setup([make_setup(row, seed=5 * row, prompt=[1, 2], **kind) for row, kind in enumerate(kinds)])
    return state


def step(state: SamplingState, logits: Tensor, numbers: list[int]) -> tuple[list[int], list[bool]]:
    rows = torch.tensor(numbers, dtype=torch.int64, device=state.device)
    sampled = sample_rows_on_device(state, logits.to(state.device), rows, np.array(numbers, dtype=np.int32))
    return sampled.tokens.tolist(), sampled.bad.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_both_paths_draw_the_same_tokens_step_after_step(dtype: torch.dtype) -> None:
    host, device = make_state("cpu", KINDS), make_state(DEVICE, KINDS)
    numbers = [3, 0, 7, 6, 1, 5, 2, 4]
    for number in range(2):
        logits = randn(len(KINDS), number, dtype)
        expected = sample(host, logits.clone().float(), np.array(numbers, dtype=np.int32))
        assert step(device, logits, numbers) == (expected.tokens.tolist(), expected.bad.tolist())
    assert (
        device.parameters.generated[:-1].tolist() == host.parameters.generated[:-1].tolist()
    )  # the last is the scratch row's
    penalised = np.array([6], dtype=np.int32)
    assert torch.equal(
        device.output_counts.tensor[penalised.tolist()].cpu(), host.output_counts.tensor[penalised.tolist()]
    )


def test_a_padded_batch_of_one() -> None:
    state, logits = make_state(DEVICE, KINDS[1:2]), randn(4, 9)
    alone = sample(make_state("cpu", KINDS[1:2]), logits[:1].clone(), np.zeros(1, dtype=np.int32))
    tokens, bad = step(state, logits, [0, *[state.scratch_row] * 3])
    assert tokens == alone.tokens.tolist() + logits[1:].argmax(dim=-1).tolist()
    assert not any(bad)
    assert int(state.parameters.generated[0]) == 1
    assert state.specs(np.array([0, state.scratch_row], dtype=np.int32)) is None


def test_16_bit_logits_are_adjusted_in_float32_and_left_as_the_model_made_them() -> None:
    state = make_state(DEVICE, [{"temperature": 0.0, "logit_bias": {8: 0.01}}])
    logits = torch.zeros(1, VOCAB_SIZE, dtype=torch.bfloat16, device=DEVICE)
    logits[0, [3, 8]] = 16.0  # the next larger bfloat16 is 16.125
    assert step(state, logits, [0])[0] == [8]
    assert logits[0, 8] == 16.0


@pytest.mark.gpu
def test_a_plain_step_never_waits() -> None:
    state, logits = make_state("cuda", KINDS), randn(len(KINDS), 1, torch.bfloat16).cuda()
    numbers = np.arange(len(KINDS), dtype=np.int32)
    rows = torch.arange(len(KINDS), device="cuda")
    specs = [LogprobSpec(top=2), *[None] * (len(KINDS) - 1)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = sample_rows_on_device(state, logits, rows, numbers)
        pending = output_logprobs(logits, sampled.tokens, specs)
        prompt = score_inputs(lambda hidden: hidden, logits, rows, LogprobSpec(top=1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert pending.read()[0] is not None
    assert prompt.to_host().tokens.tolist() == list(range(len(KINDS)))

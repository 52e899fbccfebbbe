"""On devices a row that changes its logits has a line of its own, and its company is none the wiser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sampling_reference import make_setup
from torch import Tensor

pytest.importorskip("triton")

from bough.core.plan import LogprobSpec
from bough.sampling.custom_logit_processor import CustomLogitProcessor
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import Sampled, adjust_on_device, sample, sample_rows_on_device
from bough.sampling.state import SamplingState

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on whose scalars the interpreter computes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 100
PENALISED: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.3}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {**PENALISED, "logprobs": LogprobSpec(2)},
    {"temperature": 0.8},
    {"min_new_tokens": 2, "stop_ids": (4, 5), "temperature": 0.0, "logprobs": LogprobSpec()},
    {"min_new_tokens": 2, "stop_ids": (6,), "temperature": 0.0},
    {"logprobs": LogprobSpec(1), "temperature": 0.0},
    {"logit_bias": {3: 8.0, 9: 8.0}, "temperature": 0.0},
    {**PENALISED, "logit_bias": {3: -8.0}, "top_k": 5},
]


def randn(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def make_state(device: str, kinds: list[dict[str, Any]] = KINDS) -> SamplingState:
    state = SamplingState(len(kinds), VOCAB, device)
    state.setup([make_setup(row, seed=7 * row, prompt=[1, 2], **kind) for row, kind in enumerate(kinds)])
    return state


def masks_of(allowed: dict[int, list[int]], rows: int, device: str) -> BatchMasks:
    """Of the places that stand in `allowed`."""
    masked = np.array([place in allowed for place in range(rows)])
    bits = np.zeros((len(allowed), -(-VOCAB // 32) * 32), dtype=np.uint8)
    for line, place in enumerate(sorted(allowed)):
        bits[line, allowed[place]] = 1
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    return BatchMasks(masked, torch.from_numpy(np.flatnonzero(masked)).to(device), words.to(device))


def on_device(state: SamplingState, logits: Tensor, rows: list[int], masks: BatchMasks | None = None) -> Sampled:
    numbers = torch.tensor(rows, dtype=torch.int64, device=state.device)
    return sample_rows_on_device(state, logits, numbers, np.array(rows, dtype=np.int32), masks=masks)


@pytest.mark.parametrize(
    ("masked", "dtype"), [([], torch.bfloat16), ([3], torch.bfloat16), ([0, 1, 2, 4, 6, 7], torch.float32)]
)
def test_both_paths_agree_whoever_is_masked(masked: list[int], dtype: torch.dtype) -> None:
    host, device = make_state("cpu"), make_state(DEVICE)
    rows = [5, 1, 7, 0, 3, 6, 2, 4]
    allowed = {place: [place, 11 + place, 40, 6] for place in masked}
    for step in range(2):
        logits = randn(step, dtype)
        here, there = (masks_of(allowed, len(rows), where) if masked else None for where in ("cpu", DEVICE))
        expected = sample(host, logits.float(), np.array(rows, dtype=np.int32), here)
        found = on_device(device, logits.to(DEVICE), rows, there)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.bad.tolist() == expected.bad.tolist()
    held = np.flatnonzero(host.flags.repetition | host.flags.additive)
    assert len(held) and torch.equal(
        device.output_counts.tensor[held.tolist()].cpu(), host.output_counts.tensor[held.tolist()]
    )
    assert device.parameters.generated[:-1].tolist() == host.parameters.generated[:-1].tolist() == [2] * len(KINDS)


@pytest.mark.parametrize("masked", [[], [1, 3, 5, 6]], ids=str)
def test_rows_that_want_logprobs_keep_the_models_own_logits(masked: list[int]) -> None:
    rows, logits = list(range(len(KINDS))), randn(3, torch.bfloat16).to(DEVICE)
    before = logits.clone()
    masks = masks_of({place: [place] for place in masked}, len(rows), DEVICE) if masked else None
    on_device(make_state(DEVICE), logits, rows, masks)
    kept = [row for row, kind in enumerate(KINDS) if "logprobs" in kind]
    assert torch.equal(logits[kept], before[kept])


@pytest.mark.parametrize(
    ("rows", "chosen"), [([0, 2, 4, 5], []), ([0, 1, 5], [1]), ([3, 4, 6, 0], [3, 6]), ([7, 1, 6], [7, 1, 6])]
)
def test_only_rows_with_other_numbers_get_lines(rows: list[int], chosen: list[int]) -> None:
    logits = randn(1, torch.bfloat16).to(DEVICE)[: len(rows)]
    adjusted = adjust_on_device(make_state(DEVICE), logits, np.array(rows, dtype=np.int32), None)
    assert (adjusted.numbers.tolist() if adjusted else []) == chosen
    assert adjusted is None or (adjusted.logits.dtype == torch.float32 and len(adjusted.logits) == len(chosen))


def test_the_others_are_drawn_from_16_bits_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from bough.kernels.sampling import triton

    drawn: list[tuple[torch.dtype, int, bool]] = []
    real = triton.sample_rows

    def spy(logits: Tensor, rows: Tensor, parameters: Any, filtered: bool, *more: Any) -> Any:
        drawn.append((logits.dtype, len(rows), filtered))
        return real(logits, rows, parameters, filtered, *more)

    monkeypatch.setattr(triton, "sample_rows", spy)
    on_device(make_state(DEVICE), randn(2, torch.bfloat16).to(DEVICE)[:3], [0, 5, 7])
    assert drawn == [(torch.float32, 1, True), (torch.bfloat16, 3, False)]
    drawn.clear()
    on_device(make_state(DEVICE), randn(2, torch.bfloat16).to(DEVICE)[:2], [6, 7])
    assert drawn == [(torch.float32, 2, True)]


def test_a_processor_sees_its_own_line_and_lifts_no_bar() -> None:
    class Wish(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            logits[:, 4] = 50.0
            logits[:, 8] = 40.0
            return logits

    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.0, "min_new_tokens": 1, "stop_ids": (4,)}]
    state = SamplingState(2, VOCAB, DEVICE)
    setups = [make_setup(row, **kind) for row, kind in enumerate(kinds)]
    state.setup([setups[0], replace(setups[1], processor=Wish.to_str())])
    logits = randn(8, torch.bfloat16).to(DEVICE)[:2]
    best = int(logits[0].float().argmax())
    assert on_device(state, logits, [0, 1]).tokens.tolist() == [best, 8]
    assert on_device(state, logits, [0, 1]).tokens.tolist() == [best, 4]

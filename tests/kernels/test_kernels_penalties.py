"""Bias and penalties are what float64 says they are, for the lines that ask and in any mixture."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bough.kernels.logits import reference
from bough.kernels.logits import triton as triton_kernels
from bough.kernels.logits.reference import NO_SLOT, PenaltyLines, PenaltyStore

ROWS = 9
# One row each: whether it holds counts, which prompt tokens there are, a bias. The fourth is only to be widened.
HELD = [(True, True, True), (True, False, False), (False, False, True), (False, False, False), (True, True, False)]


@pytest.fixture(params=[reference, triton_kernels], ids=["reference", "triton"], scope="module")
def implementation(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def make_store(vocab_size: int, device: torch.device) -> PenaltyStore:
    rng = np.random.default_rng(vocab_size)
    shape = (6, vocab_size)
    counts = np.where(rng.random(shape) < 0.3, rng.integers(1, 40, shape), 0)
    bias = np.where(rng.random(shape) < 0.2, rng.normal(0, 20, shape), 0.0)
    columns = (rng.uniform(0.2, 2.0, ROWS), rng.uniform(-2.0, 2.0, ROWS), rng.uniform(-2.0, 2.0, ROWS))
    floats = [torch.from_numpy(part).float().to(device) for part in (*columns, counts, bias)]
    return PenaltyStore(*floats[:4], torch.from_numpy(rng.random(shape) < 0.3).to(device), floats[4])


def make_lines(device: torch.device, held: list[tuple[bool, bool, bool]] = HELD) -> PenaltyLines:
    """Lines in no order, on slots in no order."""
    places, rows = [6, 0, 3, 5, 1][: len(held)], [2, 8, 0, 7, 4][: len(held)]
    slots = [
        [slot if kind[i] else NO_SLOT for slot, kind in zip((5, 2, 0, 3, 1), held, strict=False)] for i in range(3)
    ]
    return PenaltyLines(*torch.tensor([places, rows, *slots], device=device))


def make_logits(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 8.0
    values[:, ::7] = -torch.inf
    return values.to(device=device, dtype=dtype)


def expected_line(logits: Tensor, lines: PenaltyLines, store: PenaltyStore, number: int) -> np.ndarray:
    """One line in float64, by the definition."""
    told = (lines.places, lines.rows, lines.count_slots, lines.prompt_slots, lines.bias_slots)
    place, row, counted, prompted, biased = (int(part[number]) for part in told)
    line = logits[place].double().cpu().numpy()
    if biased >= 0:
        line = line + store.bias[biased].double().cpu().numpy()
    counts = store.counts[counted].double().cpu().numpy() if counted >= 0 else np.zeros_like(line)
    if prompted >= 0:
        seen = (counts > 0) | store.prompts[prompted].cpu().numpy()
        penalty = float(store.repetition[row])
        line = np.where(seen, np.where(line > 0, line / penalty, line * penalty), line)
    if counted >= 0:
        line = line - counts * float(store.frequency[row]) - (counts > 0) * float(store.presence[row])
    return line


def check(result: Tensor, logits: Tensor, lines: PenaltyLines, store: PenaltyStore) -> None:
    assert result.dtype == torch.float32 and result.shape == (len(lines.places), logits.shape[1])
    for number, line in enumerate(result.double().cpu().numpy()):
        np.testing.assert_allclose(line, expected_line(logits, lines, store, number), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 97, 2048, 5000])
def test_lines_become_what_their_rows_want(
    implementation: ModuleType, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits, lines, store = make_logits(vocab_size, dtype, device), make_lines(device), make_store(vocab_size, device)
    before = logits.clone()
    check(implementation.penalise(logits, lines, store), logits, lines, store)
    assert torch.equal(logits, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 151_936, 262_208, 262_145])
def test_whole_vocabularies(vocab_size: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    logits, lines, store = make_logits(vocab_size, dtype, device), make_lines(device), make_store(vocab_size, device)
    check(triton_kernels.penalise(logits, lines, store), logits, lines, store)


def test_a_line_is_the_same_in_any_company(implementation: ModuleType, device: torch.device) -> None:
    logits, store = make_logits(300, torch.bfloat16, device), make_store(300, device)
    together = implementation.penalise(logits, make_lines(device), store)
    alone = implementation.penalise(logits, make_lines(device, HELD[:1]), store)
    assert torch.equal(together[:1], alone)


def test_only_a_part_of_wider_storage_is_read(implementation: ModuleType, device: torch.device) -> None:
    """Logits may be lines of something wider."""
    wide, lines, store = make_logits(64, torch.float32, device), make_lines(device), make_store(50, device)
    check(implementation.penalise(wide[:, :50], lines, store), wide[:, :50], lines, store)


def test_no_lines_are_no_work(implementation: ModuleType, device: torch.device) -> None:
    lines = PenaltyLines(*torch.zeros((5, 0), dtype=torch.int64, device=device))
    result = implementation.penalise(torch.ones(2, 40, device=device), lines, make_store(40, device))
    assert result.shape == (0, 40)
    implementation.count_tokens_(torch.ones(1, 40, device=device), lines.count_slots, lines.places)


def test_rows_without_slots_need_no_storage(implementation: ModuleType, device: torch.device) -> None:
    store = make_store(40, device)
    store = replace(store, counts=store.counts[:0], prompts=store.prompts[:0], bias=store.bias[:0])
    logits, lines = make_logits(40, torch.bfloat16, device), make_lines(device, [(False, False, False)] * 2)
    check(implementation.penalise(logits, lines, store), logits, lines, store)


def test_tokens_are_counted_where_there_is_a_slot(implementation: ModuleType, device: torch.device) -> None:
    counts = torch.zeros(3, 50, device=device)
    slots = torch.tensor([2, NO_SLOT, 0], device=device)
    for tokens in ([7, 8, 49], [7, 9, 0]):
        implementation.count_tokens_(counts, slots, torch.tensor(tokens, device=device))
    expected = torch.zeros(3, 50)
    expected[2, 7], expected[0, 49], expected[0, 0] = 2.0, 1.0, 1.0
    assert torch.equal(counts.cpu(), expected)

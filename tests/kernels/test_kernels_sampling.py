"""Every implementation of sampling against its definition, written out in float64 and host integers."""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bough.core.seeds import GOLDEN_GAMMA, mix64
from bough.kernels.sampling import triton as triton_kernels
from bough.kernels.sampling.rows import MAX_VOCAB_SIZE, RowParameters
from bough.kernels.sampling.triton import SamplingConfig
from tests.kernels.references import sampling as reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on whose scalars the interpreter computes

SMALL = SamplingConfig(tile=32, scan_tiles=2, scan_programs=3, group=64, segment=16, gather_programs=2, block=512)
CHI_SQUARE_P_001 = 16.3  # three degrees of freedom
PLAIN: list[dict[str, Any]] = [{"random": False}, {}, {"temperature": 0.6}, {"temperature": 1.9}]
FILTERED: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_k": 200, "temperature": 1.5},
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 2.5},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.95, "temperature": 0.8},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.3, "temperature": 3.0},
]


def make_parameters(lines: list[dict[str, Any]], vocab_size: int, device: torch.device) -> RowParameters:
    """One row per line, which names what differs from a plain draw at temperature one."""
    defaults = {
        "random": (True, torch.bool),
        "temperature": (1.0, torch.float32),
        "top_k": (vocab_size, torch.int64),
        "top_p": (1.0, torch.float64),
        "min_p": (0.0, torch.float32),
        "seed": (0, torch.int64),
        "generated": (0, torch.int64),
    }
    columns = {
        name: torch.tensor([line.get(name, default) for line in lines], dtype=dtype, device=device)
        for name, (default, dtype) in defaults.items()
    }
    assert columns.keys() == {field.name for field in fields(RowParameters)}
    return RowParameters(**columns)


def randn(n: int, vocab_size: int, dtype: torch.dtype, device: torch.device, scale: float = 2.0) -> Tensor:
    values = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    return values.to(device=device, dtype=dtype)


def walk(logits: Tensor, line: dict[str, Any]) -> tuple[np.ndarray, float]:
    """The cumulative weights of what is kept, in the order of the vocabulary, and where in them the draw falls."""
    values = logits.double().cpu().numpy()
    weights = np.exp((values - values.max()) / np.float32(line.get("temperature", 1.0)))
    order = np.lexsort((np.arange(len(values)), -values))[: line.get("top_k", len(values))]
    top_p = line.get("top_p", 1.0)
    if top_p < 1.0:
        mass = weights[order].cumsum()
        order = order[: int((mass < top_p * mass[-1]).sum()) + 1]
    kept = np.zeros_like(weights)
    kept[order] = np.where(weights[order] >= np.float32(line.get("min_p", 0.0)), weights[order], 0.0)
    bits = mix64(mix64(line.get("seed", 0)) + (line.get("generated", 0) + 1) * GOLDEN_GAMMA) >> 12
    mass = kept.cumsum()
    return mass, bits * 2.0**-52 * mass[-1]


def expected_token(logits: Tensor, line: dict[str, Any]) -> int:
    """The definition: the best token, or the first at which the cumulative weight passes the random number."""
    if not line.get("random", True):
        return int(logits.double().cpu().numpy().argmax())
    mass, target = walk(logits, line)
    return int((mass <= target).sum())


def check_tokens(logits: Tensor, lines: list[dict[str, Any]], tokens: list[int]) -> None:
    """Small vocabularies: the very tokens. Large ones have tokens lighter than the rounding of float32 sums."""
    expected = [expected_token(row, line) for row, line in zip(logits, lines, strict=True)]
    if logits.shape[1] <= 1000:
        assert tokens == expected
    for row, line, token, wanted in zip(logits, lines, tokens, expected, strict=True):
        if token != wanted:
            assert line.get("random", True)
            mass, target = walk(row, line)
            assert abs(mass[token] - target) < 1e-5 * mass[-1]


@pytest.fixture(params=[reference, triton_kernels], ids=["reference", "triton"], scope="module")
def implementation(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def run(
    implementation: ModuleType,
    logits: Tensor,
    parameters: RowParameters,
    filtered: bool = True,
    config: SamplingConfig | None = SMALL,
    rows: Tensor | None = None,
) -> tuple[list[int], list[bool]]:
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    more = {"config": config} if implementation is triton_kernels else {}
    tokens, bad = implementation.sample_rows(logits, rows, parameters, filtered, **more)
    assert (tokens.dtype, bad.dtype) == (torch.int64, torch.bool)
    return tokens.tolist(), bad.tolist()


def seeded(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"seed": 1000 * place - 7, "generated": place, **line} for place, line in enumerate(lines)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 300, pytest.param(151_936, marks=pytest.mark.gpu)])
def test_plain_rows(implementation: ModuleType, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    lines = seeded(PLAIN * 2)
    logits = randn(len(lines), vocab_size, dtype, device)
    parameters = make_parameters(lines, vocab_size, device)
    config = SMALL if vocab_size < 1000 else None
    tokens, bad = run(implementation, logits, parameters, filtered=False, config=config)
    check_tokens(logits, lines, tokens)
    assert not any(bad)
    assert parameters.generated.tolist() == [line["generated"] + 1 for line in lines]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (7, torch.float32),
        (300, torch.bfloat16),
        (300, torch.float32),
        pytest.param(128_256, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(128_256, torch.float32, marks=pytest.mark.gpu),
        pytest.param(MAX_VOCAB_SIZE, torch.float16, marks=pytest.mark.gpu),
    ],
)
def test_rows_with_filters_beside_others(
    implementation: ModuleType, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    lines = seeded(PLAIN[:2] + FILTERED)
    logits = randn(len(lines), vocab_size, dtype, device)
    config = SMALL if vocab_size < 1000 else None
    tokens, _ = run(implementation, logits, make_parameters(lines, vocab_size, device), config=config)
    check_tokens(logits, lines, tokens)


@pytest.mark.parametrize(
    "change",
    [{"segment": 4}, {"block": 128}, {"scan_programs": 1, "gather_programs": 1}, {"tile": 64, "group": 256}],
    ids=str,
)
def test_sizes_change_nothing_for_a_row_alone(change: dict[str, int], device: torch.device) -> None:
    """Rows split over programs; candidates that overflow their segments and are searched for in the whole row."""
    config = SamplingConfig(**{field.name: getattr(SMALL, field.name) for field in fields(SamplingConfig)} | change)
    logits = randn(1, 300, torch.bfloat16, device, scale=0.7)
    for line in (PLAIN[2], FILTERED[0], FILTERED[3]):
        [token], _ = run(triton_kernels, logits, make_parameters([line], 300, device), config=config)
        assert token == expected_token(logits[0], line)


def test_bad_rows_fail_alone(implementation: ModuleType, device: torch.device) -> None:
    for line in ({"random": False}, {"temperature": 1.0}, {"top_k": 5, "top_p": 0.9}):
        clean = randn(5, 100, torch.float32, device)
        dirty = clean.clone()
        dirty[0, 70] = torch.nan
        dirty[1, 99] = torch.inf
        dirty[3] = -torch.inf
        dirty[4, :99] = -torch.inf
        tokens, bad = run(implementation, dirty, make_parameters([line] * 5, 100, device))
        assert bad == [True, True, False, True, False]
        assert tokens == [0, 0, expected_token(clean[2], line), 0, 99]


def test_the_first_of_equals(implementation: ModuleType, device: torch.device) -> None:
    logits = torch.zeros(3, 100, dtype=torch.bfloat16, device=device)
    logits[0, [65, 90]] = 3.0
    logits[2, ::2] = -0.0  # the same logit as zero
    lines: list[dict[str, Any]] = [{"random": False}, {"top_k": 1}, {"top_k": 1}]
    assert run(implementation, logits, make_parameters(lines, 100, device))[0] == [65, 0, 0]


@pytest.mark.slow
def test_frequencies(implementation: ModuleType, device: torch.device) -> None:
    count = 4000 if device.type == "cuda" else 120
    line = torch.tensor([0.1, -torch.inf, 1.0, -0.7, 0.4], device=device)
    parameters = make_parameters([{"seed": 11, "generated": place} for place in range(count)], 5, device)
    tokens, _ = run(implementation, line.repeat(count, 1), parameters, filtered=False)
    found, expected = np.bincount(tokens, minlength=5), torch.softmax(line.double(), 0).cpu().numpy() * count
    assert found[1] == 0
    likely = [0, 2, 3, 4]
    assert ((found[likely] - expected[likely]) ** 2 / expected[likely]).sum() < CHI_SQUARE_P_001


def test_rows_are_looked_up(implementation: ModuleType, device: torch.device) -> None:
    lines = seeded([{}, {"random": False}, {"temperature": 0.7}, {"random": False, "temperature": 0.0}])
    parameters, logits = make_parameters(lines, 64, device), randn(4, 64, torch.bfloat16, device)
    order = [2, 3, 0, 3]  # the last row pads: it may stand more than once
    tokens, bad = implementation.sample_rows(logits, torch.tensor(order, device=device), parameters, False)
    assert tokens.tolist() == [expected_token(row, lines[number]) for row, number in zip(logits, order, strict=True)]
    assert not bad.any()
    assert parameters.generated[:3].tolist() == [1, 1, 3]


def test_no_rows(implementation: ModuleType, device: torch.device) -> None:
    assert run(implementation, torch.zeros(0, 9, device=device), make_parameters([], 9, device)) == ([], [])


def test_rows_of_logits_must_be_contiguous(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        run(triton_kernels, torch.zeros(4, 4, device=device).T, make_parameters([{}] * 4, 4, device))


@pytest.mark.gpu
@pytest.mark.parametrize("filtered", [False, True])
def test_a_captured_step_draws_on(filtered: bool) -> None:
    device = torch.device("cuda")
    lines = seeded((PLAIN + FILTERED if filtered else PLAIN) * 3)
    logits = randn(len(lines), 32_000, torch.bfloat16, device)
    parameters = make_parameters(lines, 32_000, device)
    rows = torch.arange(len(lines), device=device)
    triton_kernels.sample_rows(logits, rows, parameters, filtered)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = triton_kernels.sample_rows(logits, rows, parameters, filtered)
    for step in range(1, 4):
        graph.replay()
        check_tokens(logits, [{**line, "generated": line["generated"] + step} for line in lines], tokens.tolist())


def test_lines_in_columns_are_those_of_further_output_positions(device: torch.device) -> None:
    """Three columns of four rows: the tokens that three steps would give, and nothing is counted."""
    kinds = [*PLAIN[:2], *FILTERED[:2]]
    lines = [{**line, "seed": number, "generated": 5} for number, line in enumerate(kinds)]
    logits, rows = randn(12, 300, torch.float32, device), torch.arange(4, device=device)
    alone, together = (make_parameters(lines, 300, device) for _ in range(2))
    wanted = [triton_kernels.sample_rows(logits[at : at + 4], rows, alone, True, config=SMALL)[0] for at in (0, 4, 8)]
    tokens, bad = triton_kernels.sample_rows(logits, rows.repeat(3), together, True, config=SMALL, batch=4)
    assert tokens.tolist() == torch.cat(wanted).tolist() and not bad.any()
    assert together.generated.tolist() == [5] * 4 and alone.generated.tolist() == [8] * 4

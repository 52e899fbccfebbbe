"""Every implementation and cut of the skinny products against float64.

The interpreter multiplies bfloat16 matrices as if they were integers, so by tiles that type is tested on a GPU only.
It also cuts bfloat16 off where a GPU rounds it, so nothing is compared to the last bit in that type.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.skinny_linear import reference
from bough.kernels.skinny_linear import triton as skinny
from bough.kernels.skinny_linear.tiling import MAX_WIDTH_BY_ROWS, Tiling, config_for

# In the interpreter: a gate far below zero, whose activation is zero as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ROWS = Tiling(True, 16, 0, num_warps=2)
TILES = Tiling(False, 16, 32)
SHARED = Tiling(False, 32, 16, split_k=4)
N, K = 42, 100  # neither is a multiple of any block
EPS = 1e-6

QWEN = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]


class Operands:
    """Rows, residual, norm weight, weight and bias, in one type and in float64."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        x = torch.randn(m, 2 * k, device=device).to(dtype)[:, :k]  # rows are strided
        others = [torch.randn(*s, device=device).to(dtype) for s in ((m, k), (k,), (n, k), (n,))]
        self.given = (x, *others)
        self.exact = tuple(t.double() for t in self.given)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def runs_here(config: Tiling | None, dtype: torch.dtype, device: torch.device) -> bool:
    by_rows = config is not None and config.by_rows
    return device.type == "cuda" or by_rows or dtype != torch.bfloat16


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("m", "config"), [(1, ROWS), (3, ROWS), (1, TILES), (16, TILES), (1, SHARED), (5, SHARED), (16, SHARED)]
)
def test_linear(m: int, config: Tiling, biased: bool, dtype: torch.dtype, device: torch.device) -> None:
    if not runs_here(config, dtype, device):
        pytest.skip("needs a GPU")
    operands = Operands(m, N, K, dtype, device)
    x, _, _, weight, bias = operands.given
    y = skinny.skinny_linear(x, weight, bias if biased else None, config=config)
    wide_x, _, _, wide_weight, wide_bias = operands.exact
    assert y.dtype == dtype
    assert distance(y, reference.skinny_linear(wide_x, wide_weight, wide_bias if biased else None)) < TOLERANCE[dtype]


@pytest.mark.parametrize("config", [ROWS, TILES, SHARED])
def test_writes_to_a_given_tensor_and_leaves_what_it_borrowed(config: Tiling, device: torch.device) -> None:
    x, _, _, weight, _ = Operands(2, N, K, torch.float32, device).given
    wide = torch.zeros(2, N + 5, device=device)
    y = skinny.skinny_linear(x, weight, out=wide[:, :N], config=config)
    assert y.data_ptr() == wide.data_ptr()
    torch.testing.assert_close(wide[:, :N], x @ weight.T, atol=1e-4, rtol=1e-4)
    assert not wide[:, N:].any()
    again = skinny.skinny_linear(x, weight, config=config)
    assert torch.equal(again, y)
    assert not skinny._arrivals(x.device).any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("added", "plus_one"), [(False, True), (True, False)])
@pytest.mark.parametrize(("m", "config"), [(1, ROWS), (3, ROWS), (1, TILES), (16, TILES)])
def test_norm_linear_and_gate_up(
    m: int, config: Tiling, added: bool, plus_one: bool, dtype: torch.dtype, device: torch.device
) -> None:
    if not runs_here(config, dtype, device):
        pytest.skip("needs a GPU")
    operands = Operands(m, N, K, dtype, device)
    x, residual, norm_weight, weight, bias = operands.given
    kept = residual.clone()
    wide_x, wide_residual, wide_norm, wide_weight, wide_bias = operands.exact
    start = (x, residual if added else None, norm_weight, EPS, plus_one)
    wide_start = (wide_x, wide_residual if added else None, wide_norm, EPS, plus_one)

    y, stream = skinny.skinny_norm_linear(*start, weight, bias, config=config)
    expected, expected_stream = reference.skinny_norm_linear(*wide_start, wide_weight, wide_bias)
    assert distance(y, expected) < TOLERANCE[dtype]
    assert distance(stream, expected_stream) < TOLERANCE[dtype]

    for activation in ("silu", "gelu_tanh"):
        h, again = skinny.skinny_gate_up(*start, weight, activation, config=config)
        expected, _ = reference.skinny_gate_up(*wide_start, wide_weight, activation)
        assert distance(h, expected) < 2 * TOLERANCE[dtype]  # a product of two rounded products
        assert torch.equal(again, stream)
    assert torch.equal(residual, kept)


def test_float16_rows_larger_than_the_norms_weight_allows(device: torch.device) -> None:
    """By tiles a stream of 30,000 times a weight of 4 would overflow: such products take the norm first."""
    x, _, _, weight, _ = Operands(2, N, K, torch.float16, device).given
    norm_weight = torch.full((K,), 4.0, dtype=torch.float16, device=device)
    y, _ = skinny.skinny_norm_linear(x.sign() * 30000, None, norm_weight, EPS, False, weight, config=TILES)
    assert distance(y, x.sign().double() * 4 @ weight.double().T) < 2e-3


@pytest.mark.parametrize(
    ("m", "config"), [(17, TILES), (5, ROWS), (1, Tiling(True, 4, 0, split_k=2)), (0, Tiling(False, 16, 32, 2))]
)
def test_refuses_cuts_that_do_not_fit(m: int, config: Tiling, device: torch.device) -> None:
    x, weight = torch.zeros(m, K, device=device), torch.zeros(2 * N, K, device=device)
    with pytest.raises(ValueError, match=r"skinny product|cannot be split"):
        skinny.skinny_gate_up(x, None, weight[0], EPS, False, weight, "silu", config=config)


@pytest.mark.parametrize(("n", "k"), [*QWEN, *LLAMA, (256, 64), (50000, 28672), (896, 4864)])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_cuts_are_ones_that_the_kernels_take(m: int, n: int, k: int, itemsize: int) -> None:
    for fused in ({}, {"normed": True}, {"normed": True, "gated": True}):
        cut = config_for(m, n, k, itemsize, **fused)
        assert all(side & (side - 1) == 0 and side > 0 for side in (cut.block_n, cut.block_k, cut.split_k))
        assert not (fused and cut.split_k > 1)
        assert k <= MAX_WIDTH_BY_ROWS if cut.by_rows else min(cut.block_n, cut.block_k) >= 16


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [*QWEN, *LLAMA])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_shapes_of_models(m: int, n: int, k: int, device: torch.device) -> None:
    operands = Operands(m, n, k, torch.bfloat16, device)
    x, residual, norm_weight, weight, bias = operands.given
    wide_x, wide_residual, wide_norm, wide_weight, wide_bias = operands.exact
    y = skinny.skinny_linear(x, weight, bias)
    assert distance(y, reference.skinny_linear(wide_x, wide_weight, wide_bias)) < 2e-2
    if k <= 8192:
        start, wide_start = (x, residual, norm_weight, EPS, False), (wide_x, wide_residual, wide_norm, EPS, False)
        y, _ = skinny.skinny_norm_linear(*start, weight)
        assert distance(y, reference.skinny_norm_linear(*wide_start, wide_weight)[0]) < 2e-2
        h, _ = skinny.skinny_gate_up(*start, weight, "silu")
        assert distance(h, reference.skinny_gate_up(*wide_start, wide_weight, "silu")[0]) < 2e-2

"""Every implementation and cut of the skinny products against float64.

The interpreter multiplies bfloat16 matrices as if they were integers, so by tiles that type is tested on a GPU only.
It also cuts bfloat16 off where a GPU rounds it, so nothing is compared to the last bit in that type.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.ops import REFERENCE, Activation, Norm, NormedSum
from bough.kernels.skinny_linear import triton as skinny
from bough.kernels.skinny_linear.triton import (
    MAX_WIDTH_BY_ROWS,
    Tiling,
    config_for,
    fused_config_for,
    fused_worth,
    worth,
)
from tests.kernels.closeness import assert_near

# In the interpreter: a gate far below zero, whose activation is zero as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ROWS = Tiling(True, 16, 128, num_warps=2)
PIECES = Tiling(True, 8, 32, num_warps=1)
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


def runs_here(config: Tiling | None, dtype: torch.dtype, device: torch.device) -> bool:
    by_rows = config is not None and config.by_rows
    return device.type == "cuda" or by_rows or dtype != torch.bfloat16


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("m", "config"),
    [(1, ROWS), (3, ROWS), (2, PIECES), (1, TILES), (16, TILES), (1, SHARED), (5, SHARED), (16, SHARED)],
)
def test_linear(m: int, config: Tiling, biased: bool, dtype: torch.dtype, device: torch.device) -> None:
    if not runs_here(config, dtype, device):
        pytest.skip("needs a GPU")
    operands = Operands(m, N, K, dtype, device)
    x, _, _, weight, bias = operands.given
    y = skinny.skinny_linear(x, weight, bias if biased else None, config=config)
    wide_x, _, _, wide_weight, wide_bias = operands.exact
    assert y.dtype == dtype
    assert_near(y, REFERENCE.linear(wide_x, wide_weight, wide_bias if biased else None), TOLERANCE[dtype])


def test_programs_whose_share_lies_beyond_the_inputs_add_nothing(device: torch.device) -> None:
    operands = Operands(5, N, 40, torch.float32, device)  # the third of four shares is half, the fourth empty
    x, _, _, weight, _ = operands.given
    y = skinny.skinny_linear(x, weight, config=SHARED)
    assert_near(y, REFERENCE.linear(operands.exact[0], operands.exact[3], None), TOLERANCE[torch.float32])


@pytest.mark.parametrize("config", [ROWS, PIECES, TILES, SHARED])
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
@pytest.mark.parametrize(("m", "config"), [(1, ROWS), (3, ROWS), (2, PIECES)])
def test_norm_linear_and_gate_up(
    m: int, config: Tiling, added: bool, plus_one: bool, dtype: torch.dtype, device: torch.device
) -> None:
    operands = Operands(m, N, K, dtype, device)
    x, residual, norm_weight, weight, bias = operands.given
    kept = residual.clone()
    wide_x, wide_residual, wide_norm, wide_weight, wide_bias = operands.exact
    start = (x, residual if added else None, norm_weight, EPS, plus_one)
    wide_start = NormedSum(wide_x, wide_residual if added else None, Norm(wide_norm, EPS, plus_one))

    times = 2.0 if dtype == torch.bfloat16 and device.type == "cpu" else 1.0  # what is cut off adds up
    y, stream = skinny.skinny_norm_linear(*start, weight, bias, config=config)
    expected, expected_stream = REFERENCE.norm_linear(wide_start, wide_weight, wide_bias)
    assert_near(y, expected, TOLERANCE[dtype], times)
    assert_near(stream, expected_stream, TOLERANCE[dtype])

    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for activation in activations:
        h, again = skinny.skinny_gate_up(*start, weight, activation, config=config)
        expected, _ = REFERENCE.norm_gate_up(wide_start, wide_weight, None, activation)
        assert_near(h, expected, 2 * TOLERANCE[dtype], 2.0)  # a product of two rounded products
        assert torch.equal(again, stream)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize(
    ("m", "config"), [(17, TILES), (5, ROWS), (1, Tiling(True, 4, 128, split_k=2)), (1, Tiling(False, 16, 32, 2))]
)
def test_refuses_cuts_that_do_not_fit(m: int, config: Tiling, device: torch.device) -> None:
    many = 16 * skinny.MAX_SHARED_TILES + 1
    x, weight = torch.zeros(m, 1, device=device), torch.zeros(many, 1, device=device)
    with pytest.raises(ValueError, match="skinny product"):
        skinny.skinny_linear(x, weight, config=config)


@pytest.mark.parametrize(("m", "config"), [(5, ROWS), (1, TILES)])
def test_fused_products_are_taken_by_rows_only(m: int, config: Tiling, device: torch.device) -> None:
    x, weight = torch.zeros(m, K, device=device), torch.zeros(2 * N, K, device=device)
    with pytest.raises(ValueError, match="cannot be taken by rows"):
        skinny.skinny_gate_up(x, None, weight[0], EPS, False, weight, "silu", config=config)
    with pytest.raises(ValueError, match="cannot be taken by rows"):
        skinny.skinny_norm_linear(x, None, weight[0], EPS, False, weight, config=config)


@pytest.mark.parametrize(("n", "k"), [*QWEN, *LLAMA, (256, 64), (50000, 28672), (896, 4864)])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_cuts_are_ones_that_the_kernels_take(m: int, n: int, k: int, itemsize: int) -> None:
    cut = config_for(m, n, k, itemsize)
    fused = [fused_config_for(m, k, itemsize, gated=gated) for gated in (False, True)] if fused_worth(m, n, k) else []
    for each in (cut, *fused):
        sides = (each.block_n, each.block_k, each.split_k, each.num_warps)
        assert all(side & (side - 1) == 0 and side > 0 for side in sides)
        assert each.num_warps <= 16
        assert k <= MAX_WIDTH_BY_ROWS if each.by_rows else min(each.block_n, each.block_k) >= 16
    assert all(each.by_rows for each in fused)


@pytest.mark.parametrize(
    ("m", "n", "k", "cut"),
    [
        (1, 4096, 1024, Tiling(True, 16, 1024, num_warps=8)),
        (2, 4096, 1024, Tiling(True, 4, 1024, num_warps=2)),
        (1, 1024, 3072, Tiling(True, 1, 4096, num_warps=2)),
        (2, 4096, 4096, Tiling(True, 2, 4096, num_warps=4)),
        (1, 128256, 4096, Tiling(True, 2, 4096, num_warps=4)),
        (1, 4096, 14336, Tiling(True, 1, 16384, num_warps=4)),
        (16, 4096, 1024, Tiling(False, 32, 128, 1, 4, 5)),
        (16, 1024, 3072, Tiling(False, 32, 128, 4, 4, 5)),
        (16, 4096, 4096, Tiling(False, 32, 128, 2, 4, 5)),
        (16, 4096, 14336, Tiling(False, 32, 128, 2, 4, 5)),
        (16, 28672, 4096, Tiling(False, 64, 128, 1, 4, 5)),
        (16, 128256, 4096, Tiling(False, 32, 256, 1, 4, 4)),
    ],
)
def test_plain_cuts_are_the_fastest_measured(m: int, n: int, k: int, cut: Tiling) -> None:
    assert config_for(m, n, k) == cut


@pytest.mark.parametrize(
    ("m", "k", "gated", "cut"),
    [
        (1, 1024, False, Tiling(True, 8, 1024, num_warps=4)),
        (2, 1024, False, Tiling(True, 4, 1024, num_warps=2)),
        (1, 4096, False, Tiling(True, 4, 4096, num_warps=8)),
        (1, 1024, True, Tiling(True, 4, 1024, num_warps=4)),
        (2, 1024, True, Tiling(True, 4, 1024, num_warps=2)),
        (1, 4096, True, Tiling(True, 2, 4096, num_warps=4)),
    ],
)
def test_fused_cuts_are_the_fastest_measured(m: int, k: int, gated: bool, cut: Tiling) -> None:
    assert fused_config_for(m, k, gated=gated) == cut


def test_products_that_libraries_do_as_well_are_left_to_them() -> None:
    assert all(worth(1, n, k) for n, k in (*QWEN, *LLAMA))
    slower = {(6144, 1024), (4096, 14336)}
    assert {shape for shape in (*QWEN, *LLAMA) if not worth(2, *shape)} == slower
    tied = slower | {(6144, 4096), (28672, 4096)}
    for m in (4, 8, 16):
        assert {shape for shape in (*QWEN, *LLAMA) if not worth(m, *shape)} == tied
    assert not worth(17, 1024, 1024)
    assert [(m, k) for m in (1, 2, 4) for k in (1024, 4096) if fused_worth(m, 4096, k)] == [
        (1, 1024),
        (1, 4096),
        (2, 1024),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [*QWEN, *LLAMA])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_shapes_of_models(m: int, n: int, k: int, device: torch.device) -> None:
    operands = Operands(m, n, k, torch.bfloat16, device)
    x, residual, norm_weight, weight, bias = operands.given
    wide_x, wide_residual, wide_norm, wide_weight, wide_bias = operands.exact
    y = skinny.skinny_linear(x, weight, bias)
    assert_near(y, REFERENCE.linear(wide_x, wide_weight, wide_bias), 2e-2)
    if fused_worth(m, n, k):
        start = (x, residual, norm_weight, EPS, False)
        wide_start = NormedSum(wide_x, wide_residual, Norm(wide_norm, EPS, False))
        y, _ = skinny.skinny_norm_linear(*start, weight)
        assert_near(y, REFERENCE.norm_linear(wide_start, wide_weight, None)[0], 2e-2)
        h, _ = skinny.skinny_gate_up(*start, weight, "silu")
        assert_near(h, REFERENCE.norm_gate_up(wide_start, wide_weight, None, "silu")[0], 2e-2, 2.0)

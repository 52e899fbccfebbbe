"""Every implementation of quantising rows against the definition in float64, and products of what comes out."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.activation.reference import gated_mul
from bough.kernels.quantize_rows import reference, triton
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.rms_norm.reference import rms_norm
from bough.kernels.scaled_linear import reference as plain
from bough.kernels.scaled_linear import triton as library

MODULES = [pytest.param(reference, id="reference"), pytest.param(triton, id="triton")]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
E4M3 = torch.float8_e4m3fn
EPS = 1e-6


def back(rows: QuantizedRows) -> torch.Tensor:
    return rows.values.double() * rows.scales.double()


def check(rows: QuantizedRows, expected: torch.Tensor, near: float = 1e-6) -> None:
    """Scales are exact to rounding; each value is within half a step of 3 bits, or of the smallest step."""
    amax = expected.double().abs().amax(1, keepdim=True)
    assert rows.values.dtype == E4M3 and rows.values.is_contiguous()
    assert rows.scales.dtype == torch.float32 and rows.scales.shape == (len(expected), 1)
    torch.testing.assert_close(rows.scales.double(), amax / 448, rtol=near, atol=0)
    error = (back(rows) - expected.double()).abs()
    assert (error <= expected.double().abs() / 16 * 1.001 + amax / 448 * 2**-10 * 1.001).all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 48, 576])
def test_each_row_uses_the_whole_range(module: ModuleType, dtype: torch.dtype, size: int, device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, size + 16, device=device) * torch.tensor([1e-3, 1.0, 30.0, 0.1, 5.0], device=device)[:, None]
    x = wide.to(dtype)[:, :size]  # rows that do not stand back to back
    check(module.quantize_rows(x), x)
    assert module.quantize_rows(x).values.float().abs().amax(1).eq(448).all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("size", [64, 128, 200])
def test_each_group_uses_the_whole_range(module: ModuleType, size: int, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, size, device=device) * torch.linspace(0.01, 10, size, device=device)
    normed, gated = rms_norm(x, torch.ones(size, device=device), EPS)[0], gated_mul(torch.cat([x, x], dim=1), "silu")
    for rows, expected in (
        (module.quantize_rows(x, 128), x),
        (module.norm_quantize_rows(x, torch.ones(size, device=device), EPS, group=128)[0], normed),
        (module.gated_quantize_rows(torch.cat([x, x], dim=1), "silu", 128), gated),
    ):
        assert rows.values.shape == x.shape and rows.scales.shape == (5, -(-size // 128))
        for number, first in enumerate(range(0, size, 128)):
            part = QuantizedRows(rows.values[:, first : first + 128].contiguous(), rows.scales[:, number : number + 1])
            check(part, expected[:, first : first + 128], 1e-5)
        assert torch.equal(rows.dequantize()[:, :128], rows.values[:, :128].float() * rows.scales[:, :1])


@pytest.mark.parametrize("module", MODULES)
def test_rows_of_zeros_and_rows_with_nan(module: ModuleType, device: torch.device) -> None:
    x = torch.randn(3, 32, device=device)
    x[0] = 0.0
    x[1, 3] = float("nan")
    rows = module.quantize_rows(x)
    assert not rows.values[0].float().any() and rows.scales[0] > 0
    assert rows.values[1].float().isnan().any()
    check(QuantizedRows(rows.values[2:], rows.scales[2:]), x[2:])
    assert module.quantize_rows(x[:0]).values.shape == (0, 32)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("plus_one", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_behind_a_norm(
    module: ModuleType, dtype: torch.dtype, with_residual: bool, plus_one: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 4, 80, device=device).to(dtype)
    weight = torch.rand(80, device=device).to(dtype)
    added = residual.clone() if with_residual else None
    normed, stream = rms_norm(x, weight, EPS, added, plus_one)
    rows, found = module.norm_quantize_rows(x, weight, EPS, residual if with_residual else None, plus_one)
    assert torch.equal(found, stream)
    expected = reference.quantize_rows(normed)
    torch.testing.assert_close(rows.scales, expected.scales, rtol=5e-3, atol=0)  # a rounding of 16 bits apart
    assert (rows.values.float() == expected.values.float()).double().mean() > 0.97


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_behind_a_gate(module: ModuleType, activation: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 2 * 96, device=device).to(dtype)
    rows = module.gated_quantize_rows(x, activation)
    expected = reference.quantize_rows(gated_mul(x, activation))
    torch.testing.assert_close(rows.scales, expected.scales, rtol=5e-3, atol=0)
    assert (rows.values.float() == expected.values.float()).double().mean() > 0.97
    if activation == "silu":
        assert torch.equal(reference.quantize_rows(gated_mul(x, "silu")).scales, expected.scales)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("scaled_linear", [plain.scaled_linear, library.scaled_linear], ids=["reference", "library"])
def test_products_of_quantised_rows(scaled_linear: object, rows: int, with_bias: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 128, device=device), torch.randn(64, 128, device=device)
    bias = torch.randn(64, device=device).bfloat16() if with_bias else None
    sides = (reference.quantize_rows(x), reference.quantize_rows(weight))
    got = scaled_linear(*sides, bias, torch.bfloat16)  # type: ignore[operator]
    assert got.dtype == torch.bfloat16
    exact = back(sides[0]) @ back(sides[1]).T + (0 if bias is None else bias.double())
    assert (got.double() - exact).norm() / exact.norm() < 5e-3
    unrounded = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (got.double() - unrounded).norm() / unrounded.norm() < 5e-2


def test_which_weights_can_be_multiplied() -> None:
    assert plain.fits(576, 960)
    assert not plain.fits(24, 64) and not plain.fits(64, 24)

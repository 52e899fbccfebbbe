"""Products with weights that have a scale for every 128 inputs, or for each output, in Triton, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.quantize_rows.reference import quantize_rows
from bough.kernels.scaled_linear import reference
from bough.kernels.scaled_linear import triton as fast
from bough.kernels.scaled_linear.triton import CUTS, Cut, config_for
from tests.kernels.closeness import assert_near

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
BY_NORM = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def ragged(rows: int, size: int, device: torch.device) -> torch.Tensor:
    """Rows whose groups have scales of their own."""
    return torch.randn(rows, size, device=device) * torch.linspace(0.1, 3, size, device=device)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "cut"),
    [
        (40, 208, 72, None),
        (3, 256, 40, Cut(16, 32, 4, 2)),
        (70, 200, 40, Cut(32, 64, 4, 2)),  # lines that no descriptor takes
        (130, 320, 200, None),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_groups(
    rows: int, inputs: int, outputs: int, cut: Cut | None, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, weight = (quantize_rows(ragged(side, inputs, device), 128) for side in (rows, outputs))
    bias = torch.randn(outputs, device=device).to(dtype) if rows == 40 else None
    exact = x.dequantize().double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    for product in (reference.scaled_linear(x, weight, bias, dtype), fast.scaled_linear(x, weight, bias, dtype)):
        assert product.dtype == dtype
        assert_near(product, exact, BY_NORM[dtype])
    if cut is not None:
        assert_near(fast.scaled_linear(x, weight, bias, dtype, config=cut), exact, BY_NORM[dtype])


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(40, 208, 80), (5, 256, 48), (130, 320, 208)])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_products_of_outputs_that_torch_has_few_programs_for(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, weight = (quantize_rows(ragged(side, inputs, device)) for side in (rows, outputs))
    bias = torch.randn(outputs, device=device).to(dtype) if rows == 40 else None
    exact = x.dequantize().double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    product = fast.scaled_linear(x, weight, bias, dtype)
    assert product.dtype == dtype
    assert_near(product, exact, BY_NORM[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 64, 128, 256, 512])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (28672, 4096), (4096, 14336)])
def test_products_of_real_outputs(rows: int, outputs: int, inputs: int) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    x, weight = quantize_rows(ragged(rows, inputs, device)), quantize_rows(ragged(outputs, inputs, device))
    exact = x.dequantize().double() @ weight.dequantize().double().T
    assert_near(fast.scaled_linear(x, weight, None, torch.bfloat16), exact, 1e-2)


@pytest.mark.parametrize("kind", ["by outputs", "in groups", "integers"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 200, 40), (2, 320, 24), (5, 320, 72), (16, 2048, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_a_few_rows_as_they_are(
    rows: int, inputs: int, outputs: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = ragged(rows, inputs, device).to(dtype)
    weight = quantize_rows(ragged(outputs, inputs, device), 128 if kind == "in groups" else 0)
    if kind == "integers":
        integers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
        weight = weight._replace(values=integers)
    bias = torch.randn(outputs, device=device).to(dtype)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    assert_near(reference.weight_linear(x.double(), weight, bias.double()).to(dtype), exact, BY_NORM[dtype])
    assert_near(fast.weight_linear(x, weight, bias), exact, BY_NORM[dtype])


def test_cuts_leave_enough_programs() -> None:
    assert config_for(8192, 4096) == CUTS[0] and config_for(40, 576) == CUTS[-1]
    assert config_for(100, 7168) == CUTS[1]  # in two rows of tiles


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 300, 4096])
@pytest.mark.parametrize(("outputs", "inputs"), [(2112, 7168), (4096, 4096), (7168, 2304), (576, 1032)])
def test_products_of_real_shapes(rows: int, outputs: int, inputs: int) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    x, weight = ragged(rows, inputs, device).bfloat16(), quantize_rows(ragged(outputs, inputs, device), 128)
    small, values = quantize_rows(x, 128), weight.dequantize().double()
    got = fast.scaled_linear(small, weight, None, torch.bfloat16)
    assert_near(got, small.dequantize().double() @ values.T, 1e-2)
    if rows <= reference.FEW_ROWS:
        assert_near(fast.weight_linear(x, weight, None), x.double() @ values.T, 1e-2)

"""The Triton RMS norm against the formula in float64, and where it differs from the reference by contract."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.rms_norm.reference import rms_norm as reference
from bough.kernels.rms_norm.triton import RowTiling, config_for, rms_norm
from tests.kernels.closeness import assert_near

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
gpu_shape = pytest.param((8192, 4096), marks=pytest.mark.gpu)


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 4, 16), (2, 2, 3, 8), gpu_shape])
def test_equals_the_formula(shape: tuple[int, ...], plus_one: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, device=device) * 3
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    normed, stream = rms_norm(x, weight, 1e-5, plus_one=plus_one)
    assert normed.dtype == dtype
    assert normed.shape == x.shape
    assert_near(normed, formula(x, weight.double() + plus_one, 1e-5), TOLERANCE[dtype])
    assert stream is x


# The interpreter cuts bfloat16 off where a GPU rounds it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_the_sum_replaces_the_residual_rounded_as_the_reference_rounds(
    dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 7, 96, device=device).to(dtype)
    weight = torch.randn(96, device=device).to(dtype)
    expected, expected_stream = reference(x, weight, 1e-6, residual)
    normed, stream = rms_norm(x, weight, 1e-6, residual)
    assert stream is residual
    assert torch.equal(stream, expected_stream)
    torch.testing.assert_close(normed, expected)


@pytest.mark.parametrize("config", [None, RowTiling(1, 1), RowTiling(4, 2)])
def test_takes_a_slice_of_heads_without_copying(config: RowTiling | None, device: torch.device) -> None:
    """Six heads of each token beside others: rows are strided in the first dimension; blocks of rows end unevenly."""
    torch.manual_seed(0)
    qkv, weight = torch.randn(3, 10, 16, device=device), torch.randn(16, device=device)
    heads = qkv[:, 2:8]
    normed, stream = rms_norm(heads, weight, 1e-6, config=config)
    assert stream is heads
    assert_near(normed, formula(heads, weight, 1e-6), 1e-6)
    added, target = rms_norm(heads.contiguous(), weight, 1e-6, residual=qkv[:, 4:10], config=config)
    assert_near(added, formula(target, weight, 1e-6), 1e-6)


def test_no_rows_are_no_launch(device: torch.device) -> None:
    normed, _ = rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-6)
    assert normed.shape == (0, 8)


def test_short_rows_share_a_program_once_they_are_many() -> None:
    assert config_for(16, 128).rows == 1
    assert config_for(8192 * 24, 128).rows == 8
    assert config_for(8192, 4096).rows == 1

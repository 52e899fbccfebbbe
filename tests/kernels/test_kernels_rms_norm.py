"""RMS norm against its formula in float64, in each type and with each option."""

from __future__ import annotations

import pytest
import torch

from bough.kernels.rms_norm.reference import rms_norm


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 4, 16)])
def test_equals_the_formula(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[-1], dtype=dtype)
    normed, stream = rms_norm(x, weight, 1e-5)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), formula(x, weight, 1e-5), atol=tolerance, rtol=tolerance)
    assert torch.equal(stream, x)


def test_adds_the_residual_first_and_returns_the_sum() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    kept = (x.clone(), residual.clone())
    normed, stream = rms_norm(x, weight, 1e-6, residual)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(normed, formula(x + residual, weight, 1e-6).float())
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_eps_keeps_a_zero_row_finite() -> None:
    normed, _ = rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6)
    assert torch.equal(normed, torch.zeros(2, 8))


def test_plus_one_survives_a_16_bit_weight() -> None:
    """1 + 0.001 is 1 in bfloat16: the one must be added in float32."""
    x, weight = torch.randn(3, 64).float(), torch.full((64,), 0.001, dtype=torch.bfloat16)
    normed, _ = rms_norm(x, weight, 1e-6, plus_one=True)
    torch.testing.assert_close(normed.double(), formula(x, 1 + weight.double(), 1e-6), atol=1e-6, rtol=1e-6)

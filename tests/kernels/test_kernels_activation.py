"""Every implementation of the gated activations against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from bough.kernels.activation import reference
from bough.kernels.activation import triton as triton_kernels
from tests.kernels.closeness import assert_near

# In the interpreter: a gate far below zero, whose activation is zero as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@pytest.fixture(params=[reference, triton_kernels], ids=["reference", "triton"], scope="module")
def implementation(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.parametrize("shape", [(1, 48), (20, 1100), (2, 3, 32), pytest.param((8192, 28672), marks=pytest.mark.gpu)])
def test_equals_the_formula(
    implementation: Any, shape: tuple[int, ...], name: str, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    out = implementation.gated_mul(x, name)
    gate, up = x.double().chunk(2, dim=-1)
    expected = FORMULAS[name](gate) * up
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert_near(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", list(FORMULAS))
def test_rows_may_be_strided_and_extremes_stay_finite(implementation: Any, name: str, device: torch.device) -> None:
    x = torch.tensor([[-200.0, 200.0, 2.0, 3.0, 9.0], [0.0, -1.0, 5.0, 1.0, 9.0]], device=device)[:, :4]
    out = implementation.gated_mul(x, name)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(out, FORMULAS[name](gate) * up)

"""The normaliser of logits against float64, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch

from bough.kernels.logits import reference
from bough.kernels.logits import triton as fast


@pytest.mark.parametrize("kernel", [reference.log_normaliser, fast.log_normaliser])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_normalises(device: torch.device, kernel, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    logits = (torch.randn(5, 5000, generator=torch.Generator().manual_seed(1)) * 4).to(dtype).to(device)
    logits[1, :10] = -torch.inf
    logits[2] += 1000
    peak, log_sum = kernel(logits)
    assert peak.shape == log_sum.shape == (5, 1)
    expected = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close((logits.float() - peak - log_sum).double(), expected, atol=1e-5, rtol=1e-5)


def test_rows_have_the_same_bits_in_any_batch(device: torch.device) -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)).to(device)
    whole = fast.log_normaliser(logits)[1]
    for row in range(6):
        assert torch.equal(fast.log_normaliser(logits[row : row + 1])[1], whole[row : row + 1])
    assert fast.log_normaliser(logits[:0])[0].shape == (0, 1)

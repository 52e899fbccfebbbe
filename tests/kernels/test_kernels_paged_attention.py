"""The naive paged attention against torch's dense attention, in float64: the truth must itself be true."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.references.paged_attention import paged_attention


@pytest.mark.parametrize("window", [None, 3])
def test_equals_dense_attention(window: int | None) -> None:
    torch.manual_seed(0)
    length, queries, page_size = 11, 4, 4
    q = torch.randn(queries, 4, 8, dtype=torch.float64)
    keys, values = torch.randn(2, length, 2, 8, dtype=torch.float64)
    pages = torch.tensor([[5, 0, 3]])
    slots = (pages[0, :, None] * page_size + torch.arange(page_size)).flatten()[:length]
    k_cache, v_cache = torch.full((2, 6 * page_size, 2, 8), float("nan"), dtype=torch.float64)
    k_cache[slots], v_cache[slots] = keys, values

    out = paged_attention(q, k_cache, v_cache, pages, [0, queries], [length - queries], page_size, 0.3, window)

    seen = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    if window is not None:
        seen &= torch.ones(queries, length, dtype=torch.bool).triu(length - queries - window + 1)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))


def test_softcap_bounds_the_scores() -> None:
    """With a tiny cap all scores are nearly equal, so the result is nearly the mean of the values."""
    torch.manual_seed(0)
    q, values = torch.randn(1, 1, 4), torch.randn(3, 1, 4)
    out = paged_attention(q * 50, values * 50, values, torch.tensor([[0, 1, 2]]), [0, 1], [2], 1, 1.0, softcap=1e-5)
    torch.testing.assert_close(out[0], values.mean(0), atol=1e-4, rtol=1e-4)

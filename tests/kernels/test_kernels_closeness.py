"""The comparison that all tests of kernels rest on notices one wrong number among very many."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.closeness import assert_near


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 2e-3), (torch.bfloat16, 4e-2), (torch.float16, 4e-2)])
def test_one_wrong_element_among_many_is_seen(dtype: torch.dtype, off: float) -> None:
    expected = torch.randn(300, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = expected.to(dtype)
    assert_near(actual, expected)
    actual[7, 9] += off * float(expected[7].abs().max())
    with pytest.raises(AssertionError, match="element 2809 of 120000"):
        assert_near(actual, expected)


def test_small_numbers_beside_large_ones_may_be_off_by_what_those_are_rounded() -> None:
    expected = torch.tensor([[100.0, 1e-6], [1.0, 2.0]], dtype=torch.float64)
    assert_near(torch.tensor([[100.0, 0.05], [1.0, 2.0]]), expected)
    with pytest.raises(AssertionError, match=r"in a row up to 2\.0"):
        assert_near(torch.tensor([[100.0, 0.0], [1.05, 2.0]]), expected)


def test_an_error_everywhere_is_seen_by_norm_and_so_is_nan() -> None:
    expected = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="by norm"):
        assert_near(torch.full((4, 4), 1.0005), expected, by_norm=1e-4)
    with pytest.raises(AssertionError, match="by norm"):
        assert_near(torch.full((4, 4), torch.nan), expected)


def test_a_row_of_zeros_must_be_zeros() -> None:
    expected = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert_near(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), expected)
    with pytest.raises(AssertionError, match="element 1 of 4"):
        assert_near(torch.tensor([[0.0, 1e-5], [1.0, 1.0]]), expected)

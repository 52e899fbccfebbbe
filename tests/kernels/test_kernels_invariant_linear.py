"""Invariant products: near the reference in float64, and the same bits for a row in any company and by any cut.

Triton's interpreter multiplies bfloat16 matrices as if they were integers: that type is tested on a GPU only, also by
`gpu_check_deterministic.py`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.kernels.invariant_linear import triton as fast
from bough.kernels.invariant_linear.triton import NARROWEST, PIECE_STEP, LinearConfig, Tile, config_for, piece_for
from tests.kernels.closeness import assert_near

TILE = Tile(32, 32, 32, num_warps=4, num_stages=2)


def make(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    tensors = (torch.randn(shape, generator=generator) for shape in ((m, k), (n, k), (n,)))
    x, weight, bias = (t.to(dtype).to(device) for t in tensors)
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "piece"), [(5, 40, 128, 128), (50, 72, 336, 128), (33, 8, 40, 128), (5, 1, 64, 128)]
)
def test_it_is_near_the_reference(
    device: torch.device, m: int, n: int, k: int, piece: int, parallel: bool, with_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = make(m, n, k, dtype, device)
    given_bias = bias if with_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    got = fast.invariant_linear(x, weight, given_bias, config=LinearConfig(TILE, piece, parallel))
    assert got.dtype == dtype
    assert_near(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_have_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = make(70, 48, 400, dtype, device)
    whole = fast.invariant_linear(x, weight, bias, config=LinearConfig(TILE, 256, parallel=False))
    for parallel in (False, True):
        config = LinearConfig(TILE, 256, parallel)
        for first, last in ((0, 1), (40, 41), (3, 20), (0, 70)):
            got = fast.invariant_linear(x[first:last], weight, bias, config=config)
            assert torch.equal(got, whole[first:last]), (config, first, last)


def test_the_result_may_be_wider_than_the_inputs(device: torch.device) -> None:
    x, weight, _ = make(3, 40, 64, torch.float16, device)
    got = fast.invariant_linear(x, weight, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got.half(), fast.invariant_linear(x, weight))


def test_no_rows_give_no_rows(device: torch.device) -> None:
    x, weight, _ = make(0, 40, 64, torch.float16, device)
    assert fast.invariant_linear(x, weight).shape == (0, 40)


@settings(max_examples=200)
@given(m=st.integers(1, 20_000), n=st.integers(1, 160_000), k=st.integers(8, 16_384), itemsize=st.sampled_from([2, 4]))
def test_cuts_differ_only_where_bits_cannot(m: int, n: int, k: int, itemsize: int) -> None:
    config = config_for(m, n, k, itemsize)
    assert config.piece == piece_for(n, k)
    assert config.piece % PIECE_STEP == 0
    assert PIECE_STEP % config.tile.block_k == 0
    if itemsize == 2:
        assert config.tile.block_m >= 64
        assert config.tile.block_n >= NARROWEST


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1024, 3072), (4096, 1024), (576, 1536), (49152, 576)])
def test_on_the_gpu(device: torch.device, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = make(1000, n, k, dtype, device)
    whole = fast.invariant_linear(x, weight, bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert_near(whole, expected)
    for first, last in ((0, 1), (5, 7), (10, 26), (100, 165), (300, 600)):
        assert torch.equal(fast.invariant_linear(x[first:last], weight, bias), whole[first:last])

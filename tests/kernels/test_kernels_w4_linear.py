"""Products with 4-bit weights against float64: the packing, the reference, and each kernel.

The interpreter multiplies bfloat16 matrices as if they were integers, so by tiles that type is tested on a GPU only.
"""

from __future__ import annotations

import pytest
import torch

from bough.kernels.ops import REFERENCE, Norm
from bough.kernels.w4_linear import reference
from bough.kernels.w4_linear.reference import IntegerRows, W4Rows, fits, pack, quantize, words_of
from tests.kernels.closeness import assert_near

# By rows the integers are summed with 2048 added to them, which leaves float32 13 bits and so far more than 16-bit
# results have.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def integers(n: int, k: int, group: int, device: torch.device) -> IntegerRows:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n, k), generator=draw, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, k // group), generator=draw, dtype=torch.uint8)
    scales = (torch.rand(n, k // group, generator=draw) * 0.02 + 0.001).half().float()
    return IntegerRows(codes.to(device), scales.to(device), zeros.to(device))


def values(rows: IntegerRows) -> torch.Tensor:
    group = rows.codes.shape[1] // rows.scales.shape[1]
    zeros, scales = (part.double().repeat_interleave(group, 1) for part in (rows.zeros, rows.scales))
    return (rows.codes.double() - zeros) * scales


@pytest.mark.parametrize(("k", "group"), [(576, 32), (576, 64), (384, 128), (512, 512), (96, 32)])
def test_packing_keeps_every_value(k: int, group: int) -> None:
    rows = integers(5, k, group, torch.device("cpu"))
    packed = pack(rows)
    assert packed.words.shape == (5, words_of(k)) and packed.words.dtype == torch.int32
    assert torch.equal(reference.dequantize(packed, k, torch.float64), values(rows))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_rounding_is_by_half_a_step_at_most(group: int) -> None:
    given = torch.randn(7, 384, generator=torch.Generator().manual_seed(3))
    given[2], given[3] = 0.0, given[3].abs() + 1.0  # a row of zeros, and one that is never near zero
    rows = quantize(given, group)
    steps = rows.scales.double().repeat_interleave(group, 1)
    assert ((values(rows) - given.double()).abs() <= 0.51 * steps).all()
    assert rows.codes.max() == 15 and torch.equal(values(rows)[2], torch.zeros(384, dtype=torch.float64))


def test_a_byte_holds_inputs_that_stand_half_a_block_apart() -> None:
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    codes[0, 128 + 5], codes[0, 128 + 64 + 5] = 3, 15
    words = pack(IntegerRows(codes, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.uint8))).words
    held = words.view(torch.uint8)[0]
    assert held.nonzero().tolist() == [[64 + 5]] and int(held[69]) == 15 << 4 | 3


def test_which_groups_have_a_product() -> None:
    assert all(fits(k, group) for k, group in ((576, 32), (576, 64), (4096, 128), (4096, 4096)))
    assert not any(fits(k, group) for k, group in ((576, 128), (576, 48), (576, 576), (96, 16)))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("m", [1, 3, 20, 150])  # by rows, by tiles of two sizes, dequantised
@pytest.mark.parametrize(("k", "group"), [(576, 32), (320, 64), (384, 128), (256, 256)])
def test_linear(m: int, k: int, group: int, biased: bool, dtype: torch.dtype, device: torch.device) -> None:
    triton = pytest.importorskip("bough.kernels.w4_linear.triton")
    if device.type == "cpu" and dtype == torch.bfloat16 and 1 < m <= triton.MOST_TILED:
        pytest.skip("needs a GPU")
    rows = integers(42, k, group, device)  # 42 is no multiple of any block
    x = torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(1)).to(device, dtype)[:, :k]
    bias = torch.randn(42, generator=torch.Generator().manual_seed(2)).to(device, dtype) if biased else None
    exact = torch.nn.functional.linear(x.double(), values(rows), None if bias is None else bias.double())
    packed = W4Rows(*(part.contiguous() for part in pack(rows)))
    for made in (reference.w4_linear(x.contiguous(), packed, bias), triton.w4_linear(x, packed, bias)):
        assert made.dtype == dtype
        assert_near(made, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("k", "group", "plus_one"), [(576, 32, False), (384, 128, True)])
def test_one_row_after_its_norm(
    k: int, group: int, plus_one: bool, held: bool, dtype: torch.dtype, device: torch.device
) -> None:
    triton = pytest.importorskip("bough.kernels.w4_linear.triton")
    draw = torch.Generator().manual_seed(1)
    rows, exact = integers(44, k, group, device), values(integers(44, k, group, device))
    x, residual, gain = (torch.randn(1, k, generator=draw).to(device, dtype) for _ in range(3))
    norm = Norm(gain[0].contiguous(), 1e-5, plus_one)
    added = residual if held else None
    normed, total = REFERENCE.rms_norm(x, norm.weight, norm.eps, added, plus_one)
    product = torch.nn.functional.linear(normed.double(), exact)
    packed = pack(rows)
    found, stream = triton.w4_norm_linear(x, added, norm, packed)
    assert_near(found, product, TOLERANCE[dtype])
    assert_near(stream, total.double(), TOLERANCE[dtype])
    gate, up = product.to(dtype).double().chunk(2, dim=1)
    found, stream = triton.w4_norm_gate_up(x, added, norm, packed, "silu")
    assert_near(found, torch.nn.functional.silu(gate) * up, 2 * TOLERANCE[dtype], times=2)
    assert_near(stream, total.double(), TOLERANCE[dtype])


def test_dequantising_is_exact(device: torch.device) -> None:
    triton = pytest.importorskip("bough.kernels.w4_linear.triton")
    rows = integers(70, 320, 64, device)
    found = triton.w4_dequantize(pack(rows), 320, torch.float32)
    assert torch.equal(found, values(rows).float())

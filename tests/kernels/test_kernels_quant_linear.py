"""Packed weights hold what the file held, for every type of GGUF that can be packed; the reference is the product."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from bough.kernels.quant_linear.packed import FLOATS, NATURAL, Format, packed_bytes
from bough.native.build import compiler
from bough.native.library import build_library, find_library
from tests.kernels.references import quant_linear as reference
from tests.native import lone_products

QUANTISED = [kind for kind in NATURAL if kind not in FLOATS]
K_QUANTS = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K)
SCALES_AT = {  # where the float16 numbers of a block are
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Compiled if it is not there: packing is the library's."""
    if find_library() is None:
        if compiler() is None:
            pytest.skip("there is no C compiler")
        build_library()


def random_rows(kind: GGMLQuantizationType, n: int, k: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Rows of random bits, but for the scales, which are of ordinary size."""
    generator = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (n * k // block, size), np.uint8)
    for at in SCALES_AT.get(kind, (0,)):
        scales = generator.uniform(0.001, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(n, -1)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 16, 37])
def test_a_packed_weight_holds_what_the_file_held(kind: GGMLQuantizationType, n: int) -> None:
    rows = random_rows(kind, n, 512)
    expected = torch.from_numpy(quants.dequantize(rows, kind))
    weight = lone_products.pack(rows, kind, 512, NATURAL[kind])
    found = reference.dequantize(weight)
    if kind not in K_QUANTS:  # whose scales are products that are rounded to 16 bits
        assert torch.equal(found, expected)
    scales = expected.view(n, -1, 16).abs().amax(dim=2, keepdim=True).expand(-1, -1, 16).reshape(n, -1)
    assert ((found - expected).abs() <= scales * 2**-9).all()
    assert torch.equal(lone_products.dequantize_row(weight, n - 1), found[n - 1])


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_any_type_can_be_packed_as_floats(kind: GGMLQuantizationType) -> None:
    rows = random_rows(kind, 19, 256)
    weight = lone_products.pack(rows, kind, 256, Format.F32)
    assert torch.equal(reference.dequantize(weight), torch.from_numpy(quants.dequantize(rows, kind)))
    assert torch.equal(lone_products.dequantize_row(weight, 17), reference.dequantize(weight)[17])


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("k", [32, 50])
def test_floats_stay_as_they_are(kind: GGMLQuantizationType, k: int) -> None:
    rows = quants.quantize(np.random.default_rng(1).standard_normal((21, k)).astype(np.float32), kind)
    weight = lone_products.pack(rows.view(np.uint8), kind, k, Format.F32)
    assert torch.equal(reference.dequantize(weight), torch.from_numpy(quants.dequantize(rows, kind)))


@pytest.mark.parametrize(("form", "steps"), [(Format.Q8, 254), (Format.Q4_MIN, 15)])
def test_floats_can_be_quantised(form: Format, steps: int) -> None:
    values = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    weight = lone_products.pack(values.numpy().view(np.uint8), GGMLQuantizationType.F32, 64, form)
    error = (reference.dequantize(weight) - values).view(20, 2, 32).abs()
    groups = values.view(20, 2, 32)
    spread = groups.abs().amax(dim=2) * 2 if form is Format.Q8 else groups.amax(dim=2) - groups.amin(dim=2)
    assert (error <= (spread / steps * 0.52)[:, :, None]).all()


@pytest.mark.parametrize(
    ("kind", "k", "form"),
    [
        (GGMLQuantizationType.F32, 40, Format.Q8),
        (GGMLQuantizationType.Q4_0, 64, Format.Q8),
        (GGMLQuantizationType.Q2_K, 256, Format.F32),
    ],
)
def test_what_cannot_be_packed_is_refused(kind: GGMLQuantizationType, k: int, form: Format) -> None:
    with pytest.raises(ValueError, match=kind.name):
        lone_products.pack(np.zeros((16, 4096), np.uint8), kind, k, form)


@pytest.mark.parametrize("kind", list(NATURAL), ids=lambda kind: kind.name)
def test_the_reference_is_the_product_with_rounded_activations(kind: GGMLQuantizationType) -> None:
    if kind in FLOATS:
        rows = quants.quantize(np.random.default_rng(3).standard_normal((33, 512)).astype(np.float32), kind)
        rows = rows.view(np.uint8)
    else:
        rows = random_rows(kind, 33, 512)
    weight = lone_products.pack(rows, kind, 512, NATURAL[kind])
    values = reference.dequantize(weight).double()
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(4))
    bias = torch.arange(33.0)
    found = reference.quant_linear(x, [weight], bias).double()
    exact = x.double() @ values.T + bias
    step = x.abs().view(5, -1, 32).amax(dim=2).div(127).repeat_interleave(32, dim=1).double()  # of activations
    rounding = torch.zeros(1) if kind in FLOATS else step / 2 @ values.abs().T
    assert ((found - exact).abs() <= rounding + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, GGMLQuantizationType.BF16), (torch.float16, GGMLQuantizationType.F16)],
    ids=["bfloat16", "float16"],
)
def test_sixteen_bit_floats_are_kept_exactly(dtype: torch.dtype, kind: GGMLQuantizationType) -> None:
    values = torch.randn(21, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    values[3, :3] = torch.tensor([6e-8, -6e4, 0.0], dtype=dtype)  # the least and about the most that float16 has
    weight = lone_products.pack(values.view(torch.uint8).numpy(), kind, 64, NATURAL[kind])
    assert torch.equal(reference.dequantize(weight), values.float())
    assert torch.equal(lone_products.dequantize_row(weight, 20), values[20].float())
    assert weight.blob.nbytes == 2 * 32 * 64


@pytest.mark.parametrize("form", list(Format), ids=lambda form: form.name)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (37, 96), (160, 2048)])
def test_the_size_of_a_weight_is_known_before_it_is_packed(form: Format, n: int, k: int) -> None:
    assert packed_bytes(form, n, k) == reference.size_of(form, n, k)

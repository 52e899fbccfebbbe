"""Every variant of the compiled product that this CPU can run, against the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from bough.kernels.quant_linear import native, reference
from bough.kernels.quant_linear.packed import FLOATS, NATURAL, Format, PackedWeight
from bough.native.library import load_library
from tests.kernels.test_kernels_quant_linear import random_rows

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the CPU kernels are not compiled")
FEATURES = {"plain": 0, "avx2": 1, "avxvnni": 9, "avx512": 3, "neon": 4, "amx": 0xFFFF}  # masks of cpu.h
KINDS = {  # one for each format
    Format.F32: GGMLQuantizationType.F32,
    Format.Q4: GGMLQuantizationType.Q4_0,
    Format.Q4_MIN: GGMLQuantizationType.Q4_1,
    Format.Q8: GGMLQuantizationType.Q8_0,
    Format.Q8_MIN: GGMLQuantizationType.Q5_1,
    Format.Q8_HALF: GGMLQuantizationType.Q6_K,
}


@pytest.fixture(params=FEATURES)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    assert LIBRARY is not None
    LIBRARY.bough_cpu_allow.argtypes = [ctypes.c_uint]
    LIBRARY.bough_cpu_allow(FEATURES[request.param])
    many = 1000 if request.param == "amx" else 1
    if native.variant(Format.Q4, many) != request.param:
        LIBRARY.bough_cpu_allow(0xFFFFFFFF)
        pytest.skip("not this CPU's")
    yield request.param
    LIBRARY.bough_cpu_allow(0xFFFFFFFF)


def make_weight(form: Format, n: int, k: int, seed: int = 0) -> PackedWeight:
    kind = KINDS[form]
    if kind in FLOATS:
        rows = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32).view(np.uint8)
    else:
        rows = random_rows(kind, n, k, seed)
    return native.pack(rows, kind, k, form)


def assert_same(variant: str, x: torch.Tensor, parts: list[PackedWeight], found: torch.Tensor) -> None:
    """Sums over groups are exact, so only the order of the rest may show; matrix tiles round to bfloat16 instead."""
    values = torch.cat([reference.dequantize(part) for part in parts]).double()
    size = x.double().abs() @ values.abs().T
    if any(native.variant(part.format, len(x)) == "amx" for part in parts):
        assert ((found - x.double() @ values.T).abs() <= size * 2**-7.9).all()
        typical = (found - x.double() @ values.T).square().mean().sqrt() / (x.double() @ values.T).square().mean().sqrt()
        assert typical < 2**-8
    else:
        assert ((found - reference.quant_linear(x, parts)).abs() <= size * 2e-6).all()


@pytest.mark.parametrize("form", list(KINDS), ids=lambda form: form.name)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 9, 17, 64, 100])
def test_every_variant_gives_the_product(variant: str, form: Format, m: int) -> None:
    k = 256 if form is Format.Q8_HALF else 96
    weight = make_weight(form, 35, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    assert_same(variant, x, [weight], native.quant_linear(x, [weight]))


@pytest.mark.parametrize("m", [1, 6, 40])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work_of_several_weights(variant: str, m: int, threads: int) -> None:
    k = 1536
    parts = [make_weight(form, n, k) for form, n in ((Format.Q4_MIN, 200), (Format.Q4, 16), (Format.Q8_HALF, 49))]
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    crew = native.Crew(threads)
    for _ in range(3):
        assert_same(variant, x, parts, native.quant_linear(x, parts, crew=crew))


@pytest.mark.parametrize("m", [1, 5, 33])
@pytest.mark.parametrize("form", [Format.F32, Format.Q4_MIN, Format.Q8], ids=lambda form: form.name)
def test_bias_strides_and_sums(variant: str, form: Format, m: int) -> None:
    weight = make_weight(form, 50, 64)
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, 100, generator=generator)[:, 10:74]
    out = torch.randn(m, 70, generator=generator)
    bias = torch.randn(50, generator=generator)
    before = out.clone()
    product = native.quant_linear(x, [weight])
    native.quant_linear(x, [weight], bias, out=out[:, 3:53], accumulate=True)
    torch.testing.assert_close(out[:, 3:53], before[:, 3:53] + product + bias)
    native.quant_linear(x, [weight], bias, out=out[:, 3:53])
    torch.testing.assert_close(out[:, 3:53], product + bias)
    assert torch.equal(out[:, :3], before[:, :3])  # nothing beside it is touched
    assert torch.equal(out[:, 53:], before[:, 53:])


@pytest.mark.parametrize("form", list(KINDS), ids=lambda form: form.name)
@pytest.mark.parametrize("m", [1, 40])
def test_extreme_codes_do_not_overflow(variant: str, form: Format, m: int) -> None:
    k = 256
    weight = make_weight(form, 16, k)
    if form is not Format.F32:
        lines = k // 32 * (4 if form.has_nibbles else 8) * 64
        weight.blob[:lines] = {Format.Q8: 0x80, Format.Q8_HALF: 0xE0, Format.Q8_MIN: 31}.get(form, 0xFF)
    for sign in (1, -1):
        x = torch.full((m, k), float(sign))
        assert_same(variant, x, [weight], native.quant_linear(x, [weight]))


def test_zeros_stay_zeros(variant: str) -> None:
    weight = make_weight(Format.Q4_MIN, 48, 64)
    for m in (1, 64):
        assert torch.equal(native.quant_linear(torch.zeros(m, 64), [weight]), torch.zeros(m, 48))


def test_every_type_has_a_format_that_the_library_knows(variant: str) -> None:
    assert LIBRARY is not None
    for kind, form in NATURAL.items():
        assert LIBRARY.bough_weight_format(int(kind)) == form
    assert LIBRARY.bough_weight_format(int(GGMLQuantizationType.Q2_K)) == -1

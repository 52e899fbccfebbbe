"""Every variant of the compiled product that this CPU can run, against the reference."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from bough.kernels.quant_linear import packed as native
from bough.kernels.quant_linear.packed import FLOATS, NATURAL, Format, PackedWeight
from bough.loader.source import PLAIN
from bough.native.build import COMMON, VARIANT_FLAGS
from bough.native.tape import ThreadPool
from tests.kernels.references import quant_linear as reference
from tests.kernels.test_kernels_quant_linear import random_rows
from tests.native import lone_products
from tests.native.drivers import RunDriver, build_driver

FEATURES = {"plain": 0, "avx2": 1, "avxvnni": 9, "avx512": 3, "neon": 4, "amx": 0xFFFF}  # masks of cpu.h
VARIANTS = (
    ["plain", "neon"] if platform.machine() in ("aarch64", "arm64") else [name for name in FEATURES if name != "neon"]
)
KINDS = {  # one for each format
    Format.F32: GGMLQuantizationType.F32,
    Format.BF16: GGMLQuantizationType.BF16,
    Format.F16: GGMLQuantizationType.F16,
    Format.Q4: GGMLQuantizationType.Q4_0,
    Format.Q4_MIN: GGMLQuantizationType.Q4_1,
    Format.Q8: GGMLQuantizationType.Q8_0,
    Format.Q8_MIN: GGMLQuantizationType.Q5_1,
    Format.Q8_HALF: GGMLQuantizationType.Q6_K,
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[str]:
    """One variant after the other, as far as this CPU has them."""
    library.bough_cpu_allow(ctypes.c_uint(FEATURES[request.param]))
    if native.variant(Format.Q4, prompt=request.param == "amx") != request.param:
        pytest.skip(f"this CPU cannot run {request.param}")
    yield request.param
    library.bough_cpu_allow(ctypes.c_uint(0xFFFFFFFF))


def make_weight(form: Format, n: int, k: int, seed: int = 0) -> PackedWeight:
    kind = KINDS[form]
    if kind in FLOATS:
        values = torch.from_numpy(np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32))
        rows = values.to(PLAIN[kind]).view(torch.uint8).numpy()
    else:
        rows = random_rows(kind, n, k, seed)
    return lone_products.pack(rows, kind, k, form)


def product(variant: str, x: torch.Tensor, parts: list[PackedWeight], **more: Any) -> torch.Tensor:
    """Matrix tiles are for prompts."""
    return lone_products.quant_linear(x, parts, prompt=variant == "amx", **more)


def assert_same(variant: str, x: torch.Tensor, parts: list[PackedWeight], found: torch.Tensor) -> None:
    """Sums over groups are exact, so only the order of the rest may show; matrix tiles round to bfloat16 instead."""
    values = torch.cat([reference.dequantize(part) for part in parts]).double()
    size = x.double().abs() @ values.abs().T
    if variant == "amx" and all(part.format is not Format.F32 for part in parts):
        assert ((found - x.double() @ values.T).abs() <= size * 2**-7.9).all()
        typical = (found - x.double() @ values.T).square().mean().sqrt() / (
            x.double() @ values.T
        ).square().mean().sqrt()
        assert typical < 2**-8
    else:
        assert ((found - reference.quant_linear(x, parts)).abs() <= size * 2e-6).all()


@pytest.mark.parametrize("form", list(KINDS), ids=lambda form: form.name)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 9, 17, 64, 100])
def test_every_variant_gives_the_product(variant: str, form: Format, m: int) -> None:
    k = 256 if form is Format.Q8_HALF else 96
    weight = make_weight(form, 35, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    assert_same(variant, x, [weight], product(variant, x, [weight]))


@pytest.mark.parametrize("m", [1, 6, 40])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work_of_several_weights(variant: str, m: int, threads: int) -> None:
    k = 1536
    formats = ((Format.Q4_MIN, 200), (Format.Q4, 16), (Format.BF16, 30), (Format.Q8_HALF, 49), (Format.F16, 17))
    parts = [make_weight(form, n, k) for form, n in formats]
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    pool = ThreadPool(native.linear_library(), threads)
    for _ in range(3):
        assert_same(variant, x, parts, product(variant, x, parts, pool=pool))


@pytest.mark.parametrize("m", [1, 5, 33])
@pytest.mark.parametrize("form", [Format.F32, Format.Q4_MIN, Format.Q8], ids=lambda form: form.name)
def test_bias_and_strides(variant: str, form: Format, m: int) -> None:
    weight = make_weight(form, 50, 64)
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, 100, generator=generator)[:, 10:74]
    out = torch.randn(m, 70, generator=generator)
    bias = torch.randn(50, generator=generator)
    before = out.clone()
    found = product(variant, x, [weight])
    product(variant, x, [weight], bias=bias, out=out[:, 3:53])
    torch.testing.assert_close(out[:, 3:53], found + bias)
    assert torch.equal(out[:, :3], before[:, :3])  # nothing beside it is touched
    assert torch.equal(out[:, 53:], before[:, 53:])


@pytest.mark.parametrize("form", list(KINDS), ids=lambda form: form.name)
@pytest.mark.parametrize("m", [1, 40])
def test_extreme_codes_do_not_overflow(variant: str, form: Format, m: int) -> None:
    k = 256
    weight = make_weight(form, 16, k)
    if not form.is_float:
        lines = k // 32 * (4 if form in (Format.Q4, Format.Q4_MIN) else 8) * 64
        weight.blob[:lines] = {Format.Q8: 0x80, Format.Q8_HALF: 0xE0, Format.Q8_MIN: 31}.get(form, 0xFF)
    for sign in (1, -1):
        x = torch.full((m, k), float(sign))
        assert_same(variant, x, [weight], product(variant, x, [weight]))


def test_zeros_stay_zeros(variant: str) -> None:
    weight = make_weight(Format.Q4_MIN, 48, 64)
    for m in (1, 64):
        assert torch.equal(product(variant, torch.zeros(m, 64), [weight]), torch.zeros(m, 48))


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", list(KINDS), ids=lambda form: form.name)
def test_what_is_no_number_shows_in_its_token_alone(variant: str, form: Format, strange: float) -> None:
    k = 256
    weight = make_weight(form, 20, k)
    for place in (0, 5, 17, 40, 255):
        x = torch.randn(3, k, generator=torch.Generator().manual_seed(place))
        x[1, place] = strange
        finite = product(variant, x, [weight]).isfinite()
        assert finite[[0, 2]].all() and not finite[1].any(), place


@pytest.mark.parametrize("form", list(KINDS), ids=lambda form: form.name)
@pytest.mark.parametrize(("n", "k", "bias"), [(35, 256, False), (90, 800, True)])
def test_a_token_has_the_same_product_in_any_company(variant: str, form: Format, n: int, k: int, bias: bool) -> None:
    """Floats of many tokens are multiplied a block of 384 inputs after the other."""
    k -= k % 256 if form is Format.Q8_HALF else 0
    weight = make_weight(form, n, k)
    generator = torch.Generator().manual_seed(1)
    x, more = torch.randn(75, k, generator=generator), {"bias": torch.randn(n, generator=generator)} if bias else {}
    together = product(variant, x, [weight], **more)
    for size in (1, 2, 3, 5, 16, 31, 33):
        pool = ThreadPool(native.linear_library(), 2)
        apart = torch.cat([product(variant, part, [weight], pool=pool, **more) for part in x.split(size)])
        assert torch.equal(apart, together), size


@pytest.mark.parametrize("kind", [kind for kind in NATURAL if kind not in FLOATS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("m", [1, 24])
def test_every_type_of_gguf_gives_nearly_the_dequantised_product(
    variant: str, kind: GGMLQuantizationType, m: int
) -> None:
    """What a file's own package makes of the rows, times activations in double precision; 8 bits of activations, or
    bfloat16, may cost a hundredth."""
    rows = random_rows(kind, 40, 512, seed=7)
    x = torch.randn(m, 512, generator=torch.Generator().manual_seed(m))
    exact = x.double() @ torch.from_numpy(quants.dequantize(rows, kind)).double().T
    found = product(variant, x, [lone_products.pack(rows, kind, 512, NATURAL[kind])])
    assert (found - exact).norm() / exact.norm() < 0.01


def test_every_type_has_a_format_that_the_library_knows(library: ctypes.CDLL) -> None:
    for kind, form in NATURAL.items():
        assert library.bough_weight_format(int(kind)) == form
    assert library.bough_weight_format(int(GGMLQuantizationType.Q2_K)) == -1


DRIVEN = ["linear*.c", "thread_pool.c", "cpu.c"]


@pytest.mark.slow
def test_another_machine_s_products_under_an_emulator(run_emulated: RunDriver) -> None:
    assert run_emulated("linear_driver.c", DRIVEN) in ("neon neon\n", "avx2 avx2\n")


EXPERTS = [*DRIVEN, "ops*.c", "experts.c", "lora.c"]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize(("driver", "sources"), [("linear_driver.c", DRIVEN), ("experts_driver.c", EXPERTS)])
@pytest.mark.slow
def test_the_products_under_sanitizers(
    tmp_path_factory: pytest.TempPathFactory, driver: str, sources: list[str], sanitizer: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"objects for {sanitizer}"
    folder.mkdir(exist_ok=True)
    checks = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    empty = ["gcc", *checks, "-x", "c", "-shared", "-fPIC", "-", "-o", str(folder / "empty.so")]
    if not shutil.which("gcc") or subprocess.run(empty, input=b"", capture_output=True).returncode:
        pytest.skip("needs gcc with its sanitizers")
    cc = ["gcc", *COMMON, "-O1", "-g", *checks]
    variants = VARIANT_FLAGS.get(platform.machine().lower(), {})
    program = build_driver(folder, cc, variants, driver, sources)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

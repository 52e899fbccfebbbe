"""Every implementation of head norm, rotation and store against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.kernels.norm_rope_store.reference import norm_rope_store_ as reference
from bough.kernels.norm_rope_store.triton import HeadTiling
from bough.kernels.norm_rope_store.triton import norm_rope_store_ as triton_kernel
from tests.kernels.closeness import assert_near

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
IMPLEMENTATIONS = [pytest.param(reference, id="reference"), pytest.param(triton_kernel, id="triton")]
SMALL = (3, 3, 2)  # tokens, heads, kv_heads: no block of heads comes out even
EPS = 1e-6


class Step:
    """Inputs of one call: tokens at scattered positions and slots, caches full of a value that no token has."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        torch.manual_seed(0)
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
        self.weights = torch.randn(2, head_dim, device=device).to(dtype)
        angle = torch.randn(50, head_dim // 2, device=device) * 3
        self.cos, self.sin = angle.cos(), angle.sin()
        self.positions = torch.randint(50, (tokens,), device=device)
        self.slots = torch.randperm(2 * tokens, device=device)[:tokens]
        # Layers of one pool: the caches of a layer are slices whose slots do not stand back to back.
        pool = torch.full((2, 2 * tokens, 2, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
        self.k_cache, self.v_cache = pool[0, :, 1], pool[1, :, 1]

    def run(self, function: Callable[..., None], normed: bool, plus_one: bool, **options: object) -> None:
        q_weight, k_weight = self.weights if normed else (None, None)
        shape = (self.heads, self.kv_heads, QKNormRope(q_weight, k_weight, EPS, plus_one, self.cos, self.sin))
        where = (self.positions, self.slots, self.k_cache, self.v_cache)
        function(self.qkv, *shape, *where, **options)

    def parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        first, last = self.heads, self.heads + self.kv_heads
        return qkv[:, :first], qkv[:, first:last], qkv[:, last:]

    def expected(self, normed: bool, plus_one: bool) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values in float64."""
        q, k, v = self.parts(self.qkv.double())
        weights = self.weights.double() + plus_one
        cos, sin = self.cos.double()[self.positions, None], self.sin.double()[self.positions, None]
        turned = []
        for part, weight in ((q, weights[0]), (k, weights[1])):
            if normed:
                part = part / torch.sqrt((part * part).mean(-1, keepdim=True) + EPS) * weight
            a, b = part.chunk(2, dim=-1)
            turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        return *turned, v.clone()


def check(step: Step, expected: tuple[torch.Tensor, ...], tolerance: float) -> None:
    q, k, v = expected
    parts = step.parts(step.qkv)
    assert_near(parts[0], q, tolerance)
    assert_near(parts[1], k, tolerance)
    assert torch.equal(parts[2].double(), v)
    assert torch.equal(step.k_cache[step.slots], parts[1])
    assert torch.equal(step.v_cache[step.slots], parts[2])
    others = torch.ones(step.k_cache.shape[0], dtype=torch.bool, device=q.device)
    others[step.slots] = False
    assert (step.k_cache[others] == 7.0).all()
    assert (step.v_cache[others] == 7.0).all()


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("normed", "plus_one"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("shape", "head_dim"),
    [(SMALL, 16), (SMALL, 80), *(pytest.param((300, 32, 8), d, marks=pytest.mark.gpu) for d in (64, 80, 96, 128, 256))],
)
def test_equals_the_formulas(
    function: Callable[..., None],
    shape: tuple[int, int, int],
    head_dim: int,
    normed: bool,
    plus_one: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    step = Step(*shape, head_dim, dtype, device)
    expected = step.expected(normed, plus_one)
    step.run(function, normed, plus_one)
    check(step, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
def test_queries_alone_are_turned_and_nothing_is_stored(function: Callable[..., None], device: torch.device) -> None:
    step, alone = (Step(*SMALL, 16, torch.float32, device) for _ in range(2))
    q = step.expected(True, False)[0]
    alone.qkv, alone.kv_heads = alone.qkv[:, : alone.heads].contiguous(), 0
    alone.run(function, True, False)
    assert_near(alone.qkv, q, 1e-5)
    assert (alone.k_cache == 7.0).all() and (alone.v_cache == 7.0).all()


@pytest.mark.parametrize("heads_together", [1, 2, 8])
def test_any_block_of_heads_gives_the_same(heads_together: int, device: torch.device) -> None:
    step = Step(*SMALL, 24, torch.float32, device)
    expected = step.expected(True, False)
    step.run(triton_kernel, True, False, config=HeadTiling(heads_together, num_warps=1))
    check(step, expected, 1e-5)


# The interpreter cuts bfloat16 off where a GPU rounds it.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_rounds_where_the_reference_rounds(dtype: torch.dtype, device: torch.device) -> None:
    """In 16 bits the normed heads are rounded before they turn: almost all values come out the same to the last bit."""
    ours, theirs = (Step(*SMALL, 64, dtype, device) for _ in range(2))
    ours.run(triton_kernel, True, False)
    theirs.run(reference, True, False)
    assert (ours.qkv == theirs.qkv).double().mean() > 0.99


def test_caches_may_have_a_type_of_their_own(device: torch.device) -> None:
    step = Step(*SMALL, 16, torch.float32, device)
    step.k_cache, step.v_cache = step.k_cache.half(), step.v_cache.half()
    step.run(triton_kernel, True, False)
    keys, values = step.parts(step.qkv)[1:]
    assert torch.equal(step.k_cache[step.slots], keys.half())
    assert torch.equal(step.v_cache[step.slots], values.half())


@pytest.mark.parametrize("function", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_caches_hold_scaled_and_saturated_values(
    function: Callable[..., None], dtype: torch.dtype, device: torch.device
) -> None:
    step = Step(*SMALL, 16, torch.float32, device)
    largest = torch.finfo(dtype).max
    values = step.parts(step.qkv)[2]
    values[0] = torch.tensor([1e9, -1e9] * 8)
    values[1, 0, 0] = float("nan")
    step.k_cache, step.v_cache = (cache.to(dtype) for cache in (step.k_cache, step.v_cache))
    step.run(function, False, False, k_scale=0.25, v_scale=3.0)
    _, keys, values = step.parts(step.qkv)
    stored_keys, stored_values = (c.float()[step.slots] for c in (step.k_cache, step.v_cache))
    assert torch.equal(stored_keys, (keys * (1 / 0.25)).to(dtype).float()), "the fresh keys are not rounded"
    expected = (values * (1.0 / 3.0)).clamp(-largest, largest).to(dtype).float()
    assert torch.equal(stored_values.nan_to_num(7e7), expected.nan_to_num(7e7))
    assert stored_values[0].abs().max() == largest
    assert stored_values[1, 0, 0].isnan()
    others = torch.ones(step.k_cache.shape[0], dtype=torch.bool, device=device)
    others[step.slots] = False
    assert (step.k_cache.float()[others] == 7.0).all()

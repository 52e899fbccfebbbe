"""The engine's random numbers: the same on host and device, evenly spread, and a function of seed and position."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.seeds import GOLDEN_GAMMA, as_int64, derive_seed, mix64, seed_for_requests
from bough.kernels.sampling.rows import UNIFORM_BITS, uniform


def test_mix_is_splitmix64() -> None:
    # The published first outputs of splitmix64 for seed 1234567.
    seed = 1234567
    outputs = [mix64(seed + (i + 1) * GOLDEN_GAMMA) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(-(2**70), 2**70), st.integers(0, 2**31))
def test_device_numbers_equal_host_numbers(seed: int, position: int) -> None:
    expected = mix64(mix64(seed) + (position + 1) * GOLDEN_GAMMA) >> (64 - UNIFORM_BITS)
    number = uniform(torch.tensor([as_int64(seed)]), torch.tensor([position]))
    assert float(number) == expected * 2.0**-UNIFORM_BITS
    assert 0.0 <= float(number) < 1.0


def test_numbers_are_spread_evenly() -> None:
    positions = torch.arange(20_000)
    for seed in (0, 1, -1, 2**62):
        counts = torch.histc(uniform(torch.full_like(positions, seed), positions), bins=20, min=0, max=1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # chi-square, 19 degrees, p = 0.001


def test_neighbouring_seeds_are_unrelated() -> None:
    positions = torch.arange(5_000)
    one, other = uniform(positions * 0 + 7, positions), uniform(positions * 0 + 8, positions)
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.05


def test_derived_seeds() -> None:
    assert derive_seed(42, 0) == 42
    derived = [derive_seed(seed, index) for seed in (0, 1, 42, -5, 2**64 - 1) for index in range(1, 200)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**63 for seed in derived)
    assert derive_seed(42, 3) == derive_seed(42, 3)


def test_as_int64_keeps_the_bits() -> None:
    assert as_int64(2**64 - 1) == -1
    assert as_int64(2**63) == -(2**63)
    assert as_int64(-1) == -1
    assert as_int64(2**64 + 5) == 5


def test_requests_without_a_seed_share_one_only_if_told_so() -> None:
    assert seed_for_requests(None, deterministic=False) is None
    assert seed_for_requests(7, deterministic=True) == seed_for_requests(7, deterministic=False) == 7
    assert seed_for_requests(None, deterministic=True) == 42

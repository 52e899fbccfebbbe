"""Where experts go: each is somewhere, ranks have equally many, and the busiest has no more to do than before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bough.distributed.experts import Slots, balanced, plain_slots, rank_loads

SHAPES = [(8, 2, 0), (8, 4, 4), (5, 2, 0), (64, 8, 8), (60, 8, 4), (3, 4, 0), (256, 32, 32), (4, 4, 12)]


def skewed(experts: int, seed: int) -> list[float]:
    return np.random.default_rng(seed).zipf(1.5, experts).clip(max=10_000).astype(float).tolist()


def of_ranks(slots: Slots, ranks: int) -> list[Slots]:
    width = len(slots) // ranks
    return [slots[rank * width : (rank + 1) * width] for rank in range(ranks)]


@pytest.mark.parametrize(("experts", "ranks", "redundant"), SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_every_expert_is_placed_and_the_busiest_rank_has_no_more_than_before(
    experts: int, ranks: int, redundant: int, seed: int
) -> None:
    plain, loads = plain_slots(experts, ranks, redundant), skewed(experts, seed)
    found = balanced(loads, plain, ranks)
    assert len(found) == len(plain) and len(found) % ranks == 0 and len(found) - experts - redundant < ranks
    assert set(found) == set(range(experts))
    assert max(rank_loads(loads, found, ranks)) <= max(rank_loads(loads, plain, ranks))
    assert sum(rank_loads(loads, found, ranks)) == pytest.approx(sum(loads))
    assert balanced(loads, found, ranks) == found == balanced(loads, plain, ranks)
    other = balanced(skewed(experts, seed + 50), found, ranks)  # the loads change
    assert set(other) == set(range(experts)) and len(other) == len(plain)


def test_a_hot_expert_gets_copies_on_several_ranks() -> None:
    loads = [90.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    plain = plain_slots(8, 4, 4)
    assert max(rank_loads(loads, plain, 4)) == 65  # its copy helps, but cold ones are beside it
    found = balanced(loads, plain, 4)
    assert Counter(found)[0] == 4 and all(0 in own for own in of_ranks(found, 4))
    assert max(rank_loads(loads, found, 4)) == 42.5  # of 160 in all


def test_without_copies_hot_experts_part_ways() -> None:
    loads = [50.0, 50.0, 1.0, 1.0]
    found = balanced(loads, plain_slots(4, 2), 2)
    assert rank_loads(loads, found, 2) == [51, 51]


@pytest.mark.parametrize("seed", range(5))
def test_skewed_loads_become_nearly_even(seed: int) -> None:
    loads = skewed(256, seed)
    plain = plain_slots(256, 16, 32)
    before, after = (max(rank_loads(loads, slots, 16)) for slots in (plain, balanced(loads, plain, 16)))
    assert after < 0.7 * before and after < 1.15 * sum(loads) / 16


def test_experts_that_stay_on_their_rank_keep_their_slot() -> None:
    loads = [float(expert % 7 + 1) for expert in range(32)]
    plain = plain_slots(32, 4)
    found = balanced(loads, plain, 4)
    for before, after in zip(of_ranks(plain, 4), of_ranks(found, 4), strict=True):
        assert all(after[slot] == expert for slot, expert in enumerate(before) if expert in after)


def test_even_loads_move_nothing() -> None:
    plain = plain_slots(16, 4, 0)
    assert balanced([3.0] * 16, plain, 4) == plain == balanced([0.0] * 16, plain, 4)

"""The tables that lead from a router's choices to places on ranks, and when experts move."""

from __future__ import annotations

import torch

from bough.distributed.topology import Topology
from bough.kernels.experts.reference import find_places
from bough.layers.placement import LayerExperts, SpreadExperts, SpreadOptions
from tests.fakes.ranks import ThreadGroup, on_ranks

CPU = torch.device("cpu")


def layer(rank: int, options: SpreadOptions, ep_size: int = 2) -> LayerExperts:
    return SpreadExperts(options=options).layer(4, Topology(rank, ep_size, ep_size), CPU)


def test_one_rank_has_all_experts_where_the_router_says() -> None:
    alone = SpreadExperts().layer(4, Topology(), CPU)
    assert alone.held == (0, 1, 2, 3) and alone.spread is None


def test_each_pair_of_token_and_expert_is_at_one_place_of_one_rank() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [3, 0], [0, 1]], dtype=torch.int32)
    slots = (0, 3, 1, 2, 0, 0)  # three copies of the first
    found = []
    for rank in range(2):
        here = layer(rank, SpreadOptions(redundant=2, count=True))
        here.place(slots)
        assert here.held == slots[3 * rank : 3 * rank + 3] and here.spread is not None
        found.append(find_places(ids, here.spread).tolist())
        assert here.loads.tolist() == [4, 2, 1, 1]
    assert found[0] == [[0, 2], [-1, -1], [1, -1], [0, 2]]
    assert found[1] == [[-1, -1], [1, 0], [-1, 2], [-1, -1]]


def test_tokens_that_travel_are_given_slots_of_all_ranks() -> None:
    here = layer(1, SpreadOptions(redundant=2, all_to_all=True))
    assert here.slots == (0, 1, 2, 3, 0, 1) and here.spread is not None and here.spread.dispatch is not None
    places = find_places(torch.tensor([[0, 3], [0, 2]], dtype=torch.int32), here.spread)
    assert places.tolist() == [[0, 3], [4, 2]]


def test_experts_move_for_a_gain_only() -> None:
    here = layer(0, SpreadOptions())
    assert here.better([0, 0, 0, 0]) == here.slots == here.better([101, 102, 100, 99])
    assert here.better([100, 100, 10, 10]) != here.slots


def test_ranks_agree_about_what_they_have_counted_together() -> None:
    def work(group: ThreadGroup) -> list[tuple[int, ...]]:
        spread = SpreadExperts(group, SpreadOptions(count=True))
        layers = [spread.layer(4, group.topology, CPU) for _ in range(2)]
        # Each knows of another hot expert, of the first layer alone.
        layers[0].loads[group.topology.tp_rank] = 100
        better = spread.better()
        spread.place(better)
        assert all(layer.seen.equal(layer.loads) for layer in layers)
        assert [layer.slots for layer in layers] == better
        return better

    first, second = on_ranks(2, work, ep_size=2)
    assert first == second and first[1] == (0, 1, 2, 3)
    assert {0, 1} != set(first[0][:2]) != {2, 3}  # the hot ones have parted
    assert SpreadExperts().better() == []  # a stage of layers without any

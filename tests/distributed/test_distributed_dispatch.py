"""Tokens travel to the ranks that have their experts and come back as weighted sums, however many each rank has."""

from __future__ import annotations

import pytest
import torch

from bough.distributed.experts import dispatch, dispatch_share
from tests.fakes.ranks import ThreadGroup, on_ranks

WIDTH, TOP = 3, 4


def problem(tokens: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    slots = torch.rand(tokens, WIDTH * ranks, generator=draw).argsort(1)[:, :TOP].int()
    return torch.randn(tokens, 5, generator=draw), slots, torch.rand(slots.shape, generator=draw)


def computed(x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Expert s multiplies with s + 1."""
    return x * ((slots + 1) * weights).sum(1, keepdim=True)


def work_on(
    group: ThreadGroup, seen: list[int], rows: torch.Tensor, places: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    seen.append(len(rows))
    assert places.dtype == torch.int32 and places.max() < WIDTH and bool((places >= 0).any(1).all())
    first = WIDTH * group.topology.tp_rank
    return rows * torch.where(places >= 0, (first + places + 1) * w, 0).sum(1, keepdim=True)


@pytest.mark.parametrize("counts", [(7, 7), (9, 0), (0, 0), (3, 1, 12, 0)])
def test_tokens_of_each_rank_come_back_with_their_experts_sums(counts: tuple[int, ...]) -> None:
    def work(group: ThreadGroup) -> int:
        seen: list[int] = []
        x, slots, weights = problem(counts[group.topology.tp_rank], len(counts))
        found = dispatch(group, WIDTH, x, slots, weights, lambda *rows: work_on(group, seen, *rows))
        torch.testing.assert_close(found, computed(x, slots, weights))
        return sum(seen)

    received = on_ranks(len(counts), work, ep_size=len(counts))
    owners = [problem(count, len(counts))[1] // WIDTH for count in counts]
    once = [sum(bool((token == rank).any()) for own in owners for token in own) for rank in range(len(counts))]
    assert received == once  # however many of its experts are there, a token travels once


@pytest.mark.parametrize("tokens", [1, 10, 64])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_the_same_tokens_see_to_a_share_each(tokens: int, ranks: int) -> None:
    x, slots, weights = problem(tokens, ranks)

    def work(group: ThreadGroup) -> torch.Tensor:
        own = dispatch_share(group, WIDTH, x, slots, weights, lambda *rows: work_on(group, [], *rows))
        assert int(own.any(1).sum()) <= -(-tokens // ranks)
        return group.all_reduce(own)

    for found in on_ranks(ranks, work, ep_size=ranks):
        torch.testing.assert_close(found, computed(x, slots, weights))

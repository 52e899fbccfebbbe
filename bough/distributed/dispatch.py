"""Tokens go to the ranks that have their experts, and the results come back: two exchanges of all with all."""

from collections.abc import Callable

import torch

from bough.distributed.group import RankGroup

# Rows, the places of their experts on this rank (-1: elsewhere) and their weights: the weighted sums.
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dispatch(
    group: RankGroup, width: int, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, multiply: Multiply
) -> torch.Tensor:
    """The weighted sums of the experts of this rank's own tokens x [tokens, hidden]; others may have more or none. A
    token goes once to each rank that has some of its `slots` [tokens, per_token], of which each rank has `width`."""
    owners = slots // width
    ranks = torch.arange(group.topology.tp_size, device=x.device)
    going = (owners == ranks[:, None, None]).any(2)  # [ranks, tokens]
    to, token = going.nonzero(as_tuple=True)
    leaving = going.sum(1)
    once = [1] * len(ranks)
    sent, taken = leaving.tolist(), group.all_to_all(leaving, once, once).tolist()
    places = torch.where(owners[token] == to[:, None], slots[token] % width, -1)
    rows, their_places, their_weights = (
        group.all_to_all(part, sent, taken) for part in (x[token], places, weights[token])
    )
    results = multiply(rows, their_places, their_weights) if len(rows) else rows
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    out.index_add_(0, token, group.all_to_all(results, taken, sent).to(out.dtype))
    return out.to(x.dtype)


def dispatch_share(
    group: RankGroup, width: int, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, multiply: Multiply
) -> torch.Tensor:
    """The same where all ranks of the group have the same tokens: each sees to a run of them, whose experts may be on
    ranks of other attention groups. The other rows are zero, so that the sum over ranks has all."""
    size, rank = group.topology.tp_size, group.topology.tp_rank
    own = slice(len(x) * rank // size, len(x) * (rank + 1) // size)
    out = torch.zeros_like(x)
    out[own] = dispatch(group.all_groups, width, x[own], slots[own], weights[own], multiply)
    return out

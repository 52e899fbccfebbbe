"""Which rank has which experts, as data: a `Slots` names the expert in each slot, the slots of one rank behind those of
the rank before. All ranks have equally many. Hot experts may be in several slots: their tokens are split among those.
Tokens go to the ranks that have their experts, and the results come back, by two exchanges of all with all.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from bough.distributed.group import RankGroup

# Rows, the places of their experts on this rank (-1: elsewhere) and their weights: the weighted sums.
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Slots = tuple[int, ...]


def plain_slots(experts: int, ranks: int, redundant: int = 0) -> Slots:
    """The experts in their order; slots that are left over, because `redundant` more are asked for or because ranks
    would have unequal numbers, hold the first ones again."""
    count = -(-(experts + redundant) // ranks) * ranks
    return tuple(slot % experts for slot in range(count))


def rank_loads(loads: Sequence[float], slots: Slots, ranks: int) -> list[float]:
    """What each rank has to do, where expert e has `loads[e]`."""
    copies, width = Counter(slots), len(slots) // ranks
    shares = [loads[expert] / copies[expert] for expert in slots]
    return [sum(shares[first : first + width]) for first in range(0, len(shares), width)]


def balanced(loads: Sequence[float], slots: Slots, ranks: int) -> Slots:
    """As many slots, filled so that the busiest rank has little to do: the experts whose copies have most get further
    copies, and then the largest shares are dealt out first, each to the rank that has least. What was better already
    stays, and so do experts that are on their rank: moving takes time."""
    width, copies = len(slots) // ranks, _copies(loads, len(slots), ranks)
    shares = sorted((-loads[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count))
    held: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for share, expert in shares:
        free = [rank for rank in range(ranks) if len(held[rank]) < width]
        rank = min([rank for rank in free if expert not in held[rank]] or free, key=lambda rank: (totals[rank], rank))
        held[rank].append(expert)
        totals[rank] -= share
    plain, dealt = plain_slots(len(loads), ranks, len(slots) - len(loads)), tuple(e for own in held for e in own)
    best = min(slots, plain, dealt, key=lambda each: max(rank_loads(loads, each, ranks)))
    parts = ((slots[first : first + width], best[first : first + width]) for first in range(0, len(slots), width))
    return tuple(expert for before, after in parts for expert in _settled(before, after))


def _copies(loads: Sequence[float], slots: int, ranks: int) -> list[int]:
    """Of each expert, on as many ranks at most."""
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        some = [expert for expert, count in enumerate(copies) if count < ranks]
        copies[max(some, key=lambda expert: (loads[expert] / copies[expert], -expert))] += 1
    return copies


def _settled(before: Slots, after: Slots) -> Slots:
    """The slots of one rank: those of experts that it has already stay."""
    coming, found = list(after), list[int]()
    for expert in before:
        stays = expert in coming
        if stays:
            coming.remove(expert)
        found.append(expert if stays else -1)
    return tuple(expert if expert >= 0 else coming.pop(0) for expert in found)


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

"""Experts that are spread over ranks: which of a layer's this rank has, and how that changes while the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from bough.distributed.dispatch import dispatch_share
from bough.distributed.experts import Slots, balanced, plain_slots, rank_loads
from bough.distributed.group import ALONE, RankGroup
from bough.distributed.topology import Topology
from bough.kernels.experts.reference import Spread

WORTH = 0.95  # experts move if the busiest rank then has less than this share of what it had


class LayerExperts:
    """The experts of one layer. `slots` says where all are, `held` which are here, by the place of their matrices."""

    def __init__(
        self, experts: int, topology: Topology, device: torch.device, options: SpreadOptions, group: RankGroup
    ) -> None:
        self._rank, self._ranks = topology.ep_rank, topology.ep_size
        slots = plain_slots(experts, self._ranks, options.redundant)
        self._width = len(slots) // self._ranks
        places = torch.empty(experts, len(slots) - experts + 1, dtype=torch.int32, device=device)
        copies = torch.empty(experts, dtype=torch.int32, device=device)
        self.loads = torch.zeros(experts, dtype=torch.int64, device=device)
        send = partial(dispatch_share, group, self._width) if options.all_to_all else None
        self._tables = Spread(places, copies, self._ranks, self.loads if options.count else None, send)
        self.place(slots)

    @property
    def spread(self) -> Spread | None:
        """How the router's choices become places; None: they are."""
        return None if self._ranks == 1 else self._tables

    @property
    def held(self) -> Slots:
        return self.slots[self._rank * self._width : (self._rank + 1) * self._width]

    def place(self, slots: Slots) -> None:
        """Changes the tables where they are: captured graphs read them there."""
        self.slots, (experts, most) = slots, self._tables.places.shape
        found: list[list[int]] = [[] for _ in range(experts)]
        for slot, expert in enumerate(slots):
            rank, place = divmod(slot, self._width)
            here = place if rank == self._rank else -1
            found[expert].append(here if self._tables.dispatch is None else slot)
        self._tables.copies.copy_(torch.tensor([len(copies) for copies in found]))
        self._tables.places.copy_(torch.tensor([copies + [-1] * (most - len(copies)) for copies in found]))

    def better(self, loads: Sequence[float]) -> Slots:
        """Where the experts had better be; where they are, if that is nearly as good."""
        slots = balanced(loads, self.slots, self._ranks)
        before, after = (max(rank_loads(loads, each, self._ranks)) for each in (self.slots, slots))
        return slots if after < WORTH * before else self.slots


@dataclass(frozen=True, slots=True)
class SpreadOptions:
    redundant: int = 0  # slots that hold further copies of experts
    count: bool = False  # how often each expert is chosen
    all_to_all: bool = False  # tokens go to the ranks that have their experts; else each rank looks at all tokens


@dataclass(frozen=True, slots=True)
class SpreadExperts:
    """Those of all layers."""

    group: RankGroup = ALONE
    options: SpreadOptions = SpreadOptions()
    layers: list[LayerExperts] = field(default_factory=list)

    def layer(self, experts: int, topology: Topology, device: torch.device) -> LayerExperts:
        """Those of one more layer."""
        self.layers.append(LayerExperts(experts, topology, device, self.options, self.group))
        return self.layers[-1]

    def better(self) -> list[Slots]:
        """Where the experts of each layer had better be, by the loads since the last time; all ranks find the same."""
        if not self.layers:
            return []
        found = self.group.all_reduce(torch.stack([layer.loads for layer in self.layers])).tolist()
        for layer in self.layers:
            layer.loads.zero_()
        return [layer.better(own) for layer, own in zip(self.layers, found, strict=True)]

    def place(self, slots: Sequence[Slots]) -> None:
        for layer, own in zip(self.layers, slots, strict=True):
            layer.place(own)

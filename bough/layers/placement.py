"""Where a model's weights live: the one argument that every layer's constructor shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from bough.core.model_config import MoEConfig, RopeConfig
from bough.distributed.group import AttentionGroup, RankGroup
from bough.distributed.topology import Topology
from bough.kernels.ops import Ops
from bough.layers.rope import RopeTable, rope_table
from bough.layers.schemes.base import ExpertWeights, LinearWeight, Part, TableWeight
from bough.layers.spread import LayerExperts, SpreadExperts

if TYPE_CHECKING:
    from bough.layers.adapters import AdapterSlots

# A scheme: makes the weight of a layer, of its inputs, the parts that stand one below the other, and whether it has a
# bias; the table of a vocabulary, of its sizes; and the experts of a layer, of the hidden size.
WeightMaker = Callable[[int, Sequence[Part], bool, "Placement"], LinearWeight]
TableMaker = Callable[[int, int, "Placement"], TableWeight]
ExpertsMaker = Callable[[int, MoEConfig, "Placement"], ExpertWeights]


@dataclass(frozen=True, slots=True)
class Placement:
    """Type, device and share of the weights, what computes with them, how partial results of ranks become one, and how
    linear layers and the vocabulary keep their weights."""

    topology: Topology
    dtype: torch.dtype
    device: torch.device
    ranks: RankGroup
    ops: Ops
    make_weight: WeightMaker
    make_table: TableMaker
    make_experts: ExpertsMaker
    spread: SpreadExperts = field(default_factory=SpreadExperts)
    make_head: TableMaker | None = None  # None: as tables are
    adapters: AdapterSlots | None = None  # None: nothing changes the weights
    _ropes: dict[tuple[RopeConfig, int, int], RopeTable] = field(default_factory=dict)

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory for a weight, not yet written."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def experts(self, moe: MoEConfig) -> LayerExperts:
        """Which of the next layer's experts are here."""
        return self.spread.layer(moe.experts, self.topology, self.device)

    @property
    def all_groups(self) -> Placement:
        """For layers that the ranks of all attention groups share."""
        return replace(self, topology=self.topology.all_groups, ranks=self.ranks.all_groups)

    @property
    def group(self) -> AttentionGroup | None:
        """None: there is one, or it is not there yet."""
        return self.ranks if isinstance(self.ranks, AttentionGroup) else None

    def mean_of_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Of equal parts of a whole, each on one rank or each on as many."""
        return self.ranks.all_reduce(x) / self.topology.tp_size

    def rope(self, config: RopeConfig, head_dim: int, context_length: int) -> RopeTable:
        """The angles of a rotation; layers that rotate alike share them."""
        key = (config, head_dim, context_length)
        if key not in self._ropes:
            self._ropes[key] = rope_table(config, head_dim, context_length, self.device)
        return self._ropes[key]

"""Where a model's weights live: the one argument that every layer's constructor shares. And experts that are spread
over ranks: which of a layer's this rank has, and how that changes while the engine runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from bough.core.control import RecordExperts
from bough.core.errors import RequestError
from bough.core.model_config import LatentConfig, ModelConfig, MoEConfig, RopeConfig
from bough.distributed.experts import Slots, balanced, dispatch_share, plain_slots, rank_loads
from bough.distributed.group import ALONE, AttentionGroup, RankGroup
from bough.distributed.topology import Topology
from bough.kernels.experts.reference import Chosen, Spread
from bough.kernels.ops import Ops
from bough.layers.rope import RopeTable, rope_table
from bough.layers.schemes.base import ExpertWeights, LinearWeight, Part, TableWeight

WORTH = 0.95  # experts move if the busiest rank then has less than this share of what it had


class LayerExperts:
    """The experts of one layer. `slots` says where all are, `held` which are here, by the place of their matrices."""

    def __init__(
        self,
        experts: int,
        topology: Topology,
        device: torch.device,
        options: SpreadOptions,
        group: RankGroup,
        chosen: Chosen | None = None,
    ) -> None:
        self._rank, self._ranks = topology.all_groups.tp_rank // topology.in_expert.tp_size, topology.ep_size
        slots = plain_slots(experts, self._ranks, options.redundant)
        self._width = len(slots) // self._ranks
        places = torch.empty(experts, len(slots) - experts + 1, dtype=torch.int32, device=device)
        copies = torch.empty(experts, dtype=torch.int32, device=device)
        self.loads = torch.zeros(experts, dtype=torch.int64, device=device)
        self.seen = self.loads.clone()  # when experts last moved
        send = partial(dispatch_share, group, self._width) if options.all_to_all else None
        self._tables = Spread(places, copies, self._ranks, self.loads if options.count else None, send, chosen)
        self.place(slots)

    @property
    def spread(self) -> Spread | None:
        """How the router's choices become places; None: they are."""
        plain = self._ranks == 1 and self._tables.loads is None and self._tables.chosen is None
        return None if plain else self._tables

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
    record: bool = False  # which experts each token of a step passes


@dataclass(frozen=True, slots=True)
class SpreadExperts:
    """Those of all layers."""

    group: RankGroup = ALONE
    options: SpreadOptions = SpreadOptions()
    layers: list[LayerExperts] = field(default_factory=list)
    chosen: Chosen = field(default_factory=Chosen)

    def layer(self, experts: int, topology: Topology, device: torch.device) -> LayerExperts:
        """Those of one more layer."""
        chosen = self.chosen if self.options.record else None
        self.layers.append(LayerExperts(experts, topology, device, self.options, self.group, chosen))
        return self.layers[-1]

    def better(self) -> list[Slots]:
        """Where the experts of each layer had better be, by the loads since the last time; all ranks find the same."""
        if not self.layers:
            return []
        loads = torch.stack([layer.loads - layer.seen for layer in self.layers])
        found = self.group.all_groups.all_reduce(loads).tolist()
        for layer in self.layers:
            layer.seen.copy_(layer.loads)
        return [layer.better(own) for layer, own in zip(self.layers, found, strict=True)]

    def place(self, slots: Sequence[Slots]) -> None:
        for layer, own in zip(self.layers, slots, strict=True):
            layer.place(own)

    def loads(self, config: ModelConfig) -> torch.Tensor:
        """How often each expert was chosen since the start: [layers of the model, experts]. All ranks of a stage count
        the same tokens."""
        assert config.moe is not None
        own, found = self.group.topology.layers_of(config), iter(self.layers)
        counts = torch.zeros(config.num_layers, config.moe.experts, dtype=torch.int64)
        for layer in range(config.num_layers):
            if layer not in own:
                counts[layer] = torch.iinfo(counts.dtype).max  # more than any other stage says
            elif config.experts_of(layer) is not None:
                counts[layer] = next(found).loads
        return torch.tensor(self.group.minimum(counts.flatten().tolist())).view_as(counts)


class ExpertRecord:
    """How often experts are chosen between two commands. Requests end before a command: it has whole ones."""

    def __init__(self, spread: SpreadExperts, config: ModelConfig) -> None:
        self._spread, self._config, self.chosen = spread, config, spread.chosen
        self._began: torch.Tensor | None = None
        self._ended: torch.Tensor | None = None

    def obey(self, command: RecordExperts) -> str:
        # Each attention group would count the tokens of all.
        if not self._spread.options.count or self._spread.group.topology.dp_size > 1:
            flags = "start with --expert-distribution-recorder-mode stat, and without --enable-dp-attention"
            raise RequestError(f"Experts are not counted; {flags}.")
        loads = self._spread.loads(self._config)
        if command.action == "start":
            self._began, self._ended = loads, None
            return "The choices of experts are counted."
        if self._began is None:
            raise RequestError("No choices of experts were counted; begin with /start_expert_distribution_record.")
        if command.action == "stop":
            self._ended = loads
            return "The choices are counted no longer; /dump_expert_distribution_record tells them."
        return json.dumps(((loads if self._ended is None else self._ended) - self._began).tolist())


# A scheme: makes the weight of a layer, of its inputs, the parts that stand one below the other, and whether it has a
# bias; the table of a vocabulary, of its sizes; and the experts of a layer, of the hidden size. Behind those, what
# adapters change in latent attention, of the heads that are here.
WeightMaker = Callable[[int, Sequence[Part], bool, "Placement"], LinearWeight]
TableMaker = Callable[[int, int, "Placement"], TableWeight]
ExpertsMaker = Callable[[int, MoEConfig, "Placement"], ExpertWeights]
LatentsMaker = Callable[[LatentConfig, slice, "Placement"], Any]


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
    make_latents: LatentsMaker | None = None  # None: no adapters change the weights
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

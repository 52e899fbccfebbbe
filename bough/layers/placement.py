"""Where a model's weights live: the one argument that every layer's constructor shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bough.distributed.topology import Topology
from bough.kernels.ops import REFERENCE, Ops
from bough.layers.schemes.base import TableMaker, WeightMaker
from bough.layers.schemes.plain import PlainTable, PlainWeight

AllReduce = Callable[[torch.Tensor], torch.Tensor]  # the sum over all ranks; it may work in place


def no_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum over a single rank."""
    return x


@dataclass(frozen=True, slots=True)
class Placement:
    """Type, device and share of the weights, what computes with them, how partial results of ranks become one, and how
    linear layers and the vocabulary keep their weights."""

    topology: Topology
    dtype: torch.dtype
    device: torch.device
    all_reduce: AllReduce = no_reduce
    ops: Ops = REFERENCE
    make_weight: WeightMaker = PlainWeight
    make_table: TableMaker = PlainTable

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory for a weight, not yet written."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

"""Where layers under test have their weights."""

from __future__ import annotations

from typing import Any

import torch

from bough.distributed.group import ALONE
from bough.distributed.topology import Topology
from bough.kernels.ops import REFERENCE
from bough.layers.placement import Placement
from bough.layers.schemes.plain import PlainExperts, PlainTable, PlainWeight


def placed(topology: Topology, dtype: torch.dtype, device: torch.device, **other: Any) -> Placement:
    """As a checkpoint has them, on one rank, unless `other` fields say otherwise."""
    plain = {"make_weight": PlainWeight, "make_table": PlainTable, "make_experts": PlainExperts}
    return Placement(topology, dtype, device, **{"ranks": ALONE, "ops": REFERENCE, **plain, **other})

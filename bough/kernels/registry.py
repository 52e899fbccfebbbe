"""Chooses the table of operations for a device, so that a model without a GPU loads no Triton."""

from __future__ import annotations

import torch

from bough.kernels.ops import REFERENCE, Ops


def ops_for(device: torch.device, deterministic: bool = False) -> Ops:
    """The fastest implementations that this device has; of a GPU's, those whose bits do not depend on the batch."""
    if device.type != "cuda":
        return REFERENCE
    if deterministic:
        from bough.kernels.invariant_ops import INVARIANT  # needs triton, which only machines with a GPU must have

        return INVARIANT
    from bough.kernels.triton_ops import TRITON

    return TRITON

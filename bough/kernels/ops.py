"""The operations that layers call, as one table chosen by device: layers never name an implementation.

Every entry has the signature of its plain torch reference. A table is plain data: building a model takes one, and a
test can put any mixture together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bough.kernels.activation import reference as activation
from bough.kernels.norm_rope_store.reference import norm_rope_store_
from bough.kernels.rms_norm.reference import rms_norm

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """What a model's layers compute with."""

    linear: Linear
    rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_mul: Callable[[torch.Tensor], torch.Tensor]
    norm_rope_store_: Callable[..., None]


REFERENCE = Ops(
    linear=torch.nn.functional.linear,
    rms_norm=rms_norm,
    silu_mul=activation.silu_mul,
    gelu_tanh_mul=activation.gelu_tanh_mul,
    norm_rope_store_=norm_rope_store_,
)


def ops_for(device: torch.device) -> Ops:
    """The fastest implementations that this device has."""
    if device.type != "cuda":
        return REFERENCE
    from bough.kernels import triton_ops  # needs triton, which only machines with a GPU must have

    return triton_ops.TRITON

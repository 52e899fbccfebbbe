"""Activations in plain torch. Of gated ones the first half of the last dimension gates the second."""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def gated_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up` of x = [..., gate | up]; "silu", or "gelu_tanh": GELU's tanh approximation. Or, without a
    gate, "relu2" of all of x."""
    if activation == "relu2":
        return relu2(x)
    gate, up = x.chunk(2, dim=-1)
    return PLAIN[activation](gate).mul_(up)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


# By their names in `ModelConfig`. Gates are the first two; MLPs without one have any.
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": relu2,
}

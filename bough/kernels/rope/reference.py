"""Rotary embedding in plain torch: the form in which the two halves of a head are the pairs' two coordinates."""

from __future__ import annotations

import torch


def apply_rope(
    x: torch.Tensor,  # [tokens, heads, head_dim]
    cos: torch.Tensor,  # [tokens, 1, head_dim]
    signed_sin: torch.Tensor,  # [tokens, 1, head_dim], the first half negated
) -> torch.Tensor:
    """Rotates each pair (i, i + head_dim / 2) by its angle.

    The sign of the rotation lives in `signed_sin`, so that one multiplication serves both halves. Angles in float32
    make the arithmetic float32 whatever the type of `x`.
    """
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    turned = (swapped * signed_sin).addcmul_(x, cos)
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)

"""Rotary embedding in plain torch: the form in which the two halves of a head are the pairs' two coordinates."""

from __future__ import annotations

import torch


def angles_of(
    cos: torch.Tensor,  # [context, rotary_dim / 2] float32
    sin: torch.Tensor,  # [context, rotary_dim / 2] float32
    positions: torch.Tensor,  # [tokens] int64, or [axes, tokens]
    axes: torch.Tensor | None = None,  # [rotary_dim / 2] int64, by which of a token's positions each pair rotates
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `apply_rope` takes, for each token. [tokens, 1, rotary_dim] each"""
    if positions.dim() == 1:
        c, s = cos[positions, None], sin[positions, None]
    else:
        assert axes is not None, "positions with several axes need a rotation that tells which pair takes which"
        places = (positions[axes].T, torch.arange(len(axes), device=axes.device))
        c, s = cos[places][:, None], sin[places][:, None]
    return torch.cat((c, c), dim=-1), torch.cat((-s, s), dim=-1)


def apply_rope(
    x: torch.Tensor,  # [tokens, heads, head_dim]
    cos: torch.Tensor,  # [tokens, 1, rotary_dim]
    signed_sin: torch.Tensor,  # [tokens, 1, rotary_dim], the first half negated
) -> torch.Tensor:
    """Rotates each pair (i, i + rotary_dim / 2) by its angle; coordinates behind `rotary_dim` stay as they are.

    The sign of the rotation lives in `signed_sin`, so that one multiplication serves both halves. Angles in float32
    make the arithmetic float32 whatever the type of `x`.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :rotary_dim], cos, signed_sin), x[..., rotary_dim:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    turned = (swapped * signed_sin).addcmul_(x, cos)
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)

"""The short convolution in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from bough.kernels.state_rows import StateRows


def causal_conv_(
    x: torch.Tensor,  # [tokens, channels]
    weight: torch.Tensor,  # [channels, width], of each channel the oldest token's first
    bias: torch.Tensor | None,  # [channels]
    tails: torch.Tensor,  # [pages, width - 1, channels] float32, the last inputs of each sequence
    rows: StateRows,
    silu: bool = True,
) -> torch.Tensor:
    """Of each channel the weighted sum of a token and those before it, in float32; and the tails of the rows go on."""
    pages, wide = rows.pages, x.float()
    before = tails[pages]
    if len(pages) == len(x):
        seen = torch.cat((before, wide[:, None]), dim=1)
        out, before = (seen * weight.float().t()).sum(1), seen[:, 1:]
    else:
        parts = []
        for tail, (begin, end) in zip(before, pairwise(rows.query_starts.tolist()), strict=True):
            seen = torch.cat((tail, wide[begin:end]))
            parts.append(F.conv1d(seen.t()[None], weight.float()[:, None], groups=len(weight))[0].t())
            tail.copy_(seen[end - begin :])
        out = torch.cat(parts)
    tails[pages] = before
    if bias is not None:
        out = out + bias
    return (F.silu(out) if silu else out).to(x.dtype)

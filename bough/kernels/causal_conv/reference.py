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
    taps, out = weight.float().t(), torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for page, (begin, end) in zip(rows.pages.tolist(), pairwise(rows.query_starts.tolist()), strict=True):
        seen = torch.cat((tails[page], x[begin:end].float()))
        for tap, scale in enumerate(taps):
            out[begin:end].addcmul_(seen[tap : tap + end - begin], scale)
        tails[page] = seen[end - begin :]
    if bias is not None:
        out = out + bias
    return (F.silu(out, inplace=True) if silu else out).to(x.dtype)

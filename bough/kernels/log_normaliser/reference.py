"""The normaliser in plain torch."""

from __future__ import annotations

import torch


def log_normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logit of each row of [n, vocabulary], and the log of the sum of exp(logit - greatest).

    Two numbers and not their sum: logits are subtracted from a number near them first, which is exact enough. Both
    [n, 1], float32 at least.
    """
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    peak = wide.amax(dim=-1, keepdim=True)
    return peak, (wide - peak).logsumexp(dim=-1, keepdim=True)

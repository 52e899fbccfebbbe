"""Embedding in plain torch."""

import torch
import torch.nn.functional as F


def embedding(
    token_ids: torch.Tensor,  # [tokens] int64
    weight: torch.Tensor,  # [vocabulary, size]
    scale: float = 1.0,
) -> torch.Tensor:
    """Row `token_ids[i]` of `weight` times `scale`, rounded to the type of `weight`. [tokens, size]"""
    x = F.embedding(token_ids, weight)
    return x if scale == 1.0 else x.mul_(scale)

"""The index of sparse attention in plain torch: the store of index keys, and the choice of tokens by their scores.

Scores are compared with each other alone, so factors that all of them have are left out.
"""

import torch
import torch.nn.functional as F

from bough.kernels.norm_rope_store.reference import angles_of, apply_rope


def index_store_(
    q: torch.Tensor,  # [tokens, heads, head_dim], the last two dimensions contiguous
    k: torch.Tensor,  # [tokens, head_dim], the last dimension contiguous
    weight: torch.Tensor,  # [head_dim]
    bias: torch.Tensor,  # [head_dim]
    eps: float,
    cos: torch.Tensor,  # [context, rope_dim / 2] float32
    sin: torch.Tensor,  # [context, rope_dim / 2] float32
    positions: torch.Tensor,  # [tokens] int64
    slots: torch.Tensor,  # [tokens] int64
    cache: torch.Tensor,  # [slots, head_dim]
) -> None:
    """Rotates the beginning of each query head in place; stores the layer norm of each key, rotated like these."""
    angles = angles_of(cos, sin, positions)
    turned = q[..., : 2 * cos.shape[1]]
    turned.copy_(apply_rope(turned, *angles))
    normed = F.layer_norm(k, k.shape[-1:], weight, bias, eps)
    cache.index_copy_(0, slots, apply_rope(normed[:, None], *angles)[:, 0].to(cache.dtype))


def index_scores(
    q: torch.Tensor,  # [..., queries, heads, head_dim]
    weights: torch.Tensor,  # [..., queries, heads]
    keys: torch.Tensor,  # [..., keys, head_dim]
) -> torch.Tensor:
    """[..., queries, keys] float32"""
    products = torch.matmul(q.flatten(-3, -2).float(), keys.float().transpose(-1, -2)).relu_()
    of_heads = products.view(*q.shape[:-1], -1)
    return torch.matmul(weights.float().unsqueeze(-2), of_heads).squeeze(-2)


def choose(scores: torch.Tensor, top: int) -> torch.Tensor:
    """The places of the best scores of each line; those of -inf are never taken, the best stands in for them.
    [..., top] int64"""
    values, places = scores.topk(top, dim=-1)
    return torch.where(values > float("-inf"), places, places[..., :1])


def hide_others(places: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """What added to scores leaves those at `places` [..., top] alone. [..., keys]"""
    mask = torch.full((*places.shape[:-1], keys), float("-inf"), dtype=dtype, device=places.device)
    return mask.scatter_(-1, places, 0.0)
